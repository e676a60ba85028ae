"""Recipe and settings: what is asked for, and what is really in effect."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="R01",
        title="A setting that makes no sense",
        symptom="[R01] max_epochs=-1 makes no sense. Give ...",
        cause="A value of the wrong kind, out of range, or one that contradicts another.",
        remedy="Refused when the object is made, before anything is started.",
        fix="The message says what may be given.",
        component="minitrainer.settings.Settings",
        test="tests/training/test_intervals.py::test_refuses_numbers_that_make_no_sense",
    ),
    Entry(
        code="R02",
        title="The recipe has mistakes, and a misspelt key changes nothing",
        symptom="[R02] trainer.max_epoch: unknown key; did you mean max_epochs?",
        cause="A dictionary of settings takes any key; nobody looks at one that nobody asks for.",
        remedy=(
            "Keys, types and classes are checked against what will be called, all problems at "
            "once, each with its key path and the nearest right name; exit code 2."
        ),
        component="minitrainer.recipe.load.load_recipe",
        test="tests/recipe/test_check.py::test_all_problems_at_once",
        plain="tests/pitfalls/test_recipe.py::test_plain_settings_take_a_misspelt_key",
    ),
    Entry(
        code="R03",
        title="The command line is not understood",
        symptom="[R03] train is not a command; there are fit, validate, test, predict, explain.",
        cause="A misspelt command or option. Settings are written as key=value, without dashes.",
        remedy="One line that names the nearest command, without waiting for torch; exit code 2.",
        fix="python -m minitrainer --help",
        component="minitrainer.command_line.parse",
        test="tests/test_cli.py::test_command_lines_that_are_not_understood",
    ),
    Entry(
        code="R20",
        title="YAML reads a number as something else",
        symptom="TypeError: '<=' not supported between instances of 'float' and 'str'.",
        patterns=("'<=' not supported between instances of 'float' and 'str'",),
        cause="YAML 1.1 takes 1e-4 for a string, 010 for 8 and 1:30 for 90.",
        remedy=(
            "1e-4 is a float, as are its relatives; 010 and 1:30 are refused, with what is meant."
        ),
        component="minitrainer.recipe.load.load_recipe",
        test="tests/recipe/test_load.py::test_surprising_numbers_are_refused",
        plain="tests/pitfalls/test_recipe.py::test_plain_yaml_reads_other_numbers",
    ),
    Entry(
        code="R21",
        title="The global batch grows with the ranks, the learning rate does not",
        symptom="More GPUs, more samples per second, and worse results after the same epochs.",
        cause=(
            "The batch size of a loader is that of one rank: 4 ranks and 4 accumulated "
            "micro-batches make a global batch 16 times as large, with a sixteenth of the steps."
        ),
        remedy=(
            "The ledger at the start says it: per rank x accumulated x ranks = global batch, "
            "steps per epoch, and the learning rate, which is changed only by a rule that is "
            "asked for: Trainer(lr_rule=LearningRateRule('linear', base_batch=256, "
            "warmup_steps=500))."
        ),
        fix=(
            "Divide the batch size by the ranks to keep a run as it was; or choose a rule or a "
            "learning rate for the new global batch."
        ),
        component="minitrainer.plugins.learning_rate.LearningRateRule",
        test="tests/plugins/test_learning_rate.py::test_the_ledger_says_it",
        plain="tests/pitfalls/test_recipe.py::test_the_global_batch_is_said",
        rows=("A2", "B23", "B35"),
    ),
)
