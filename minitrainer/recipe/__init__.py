"""From a YAML file to a trainer, a module and its data: load, check, build.

Read in this order: `load.py` (text, overrides, `${...}`), `check.py` (all problems at once, before
anything is built), `build.py`. Every problem names its key path.
"""
