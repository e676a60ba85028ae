"""All problems at once, each with its key path, before anything is constructed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minitrainer.errors import RecipeError
from minitrainer.recipe.check import Plan, check_recipe
from minitrainer.recipe.load import Recipe, load_recipe

Load = Callable[..., Recipe]


def problems(recipe: Recipe) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe)
    models = sys.modules.get("models")
    assert models is None or models.BUILT == [], "nothing is constructed before the check is done"
    return caught.value.problems


def problem(recipe: Recipe) -> str:
    (only,) = problems(recipe)
    return only


def test_a_right_recipe_is_a_plan(recipe: Load) -> None:
    plan = check_recipe(recipe("trainer.max_epochs=3"))
    assert isinstance(plan, Plan)
    assert plan.module.name == "models.Net"
    assert plan.module.arguments == {"width": 3}
    assert plan.trainer == {"max_epochs": 3}
    assert sys.modules["models"].BUILT == []


def test_all_problems_at_once(recipe: Load) -> None:
    text = """
    modul: {}
    module: {_target_: models.Net, lrr: 1, lr: "0.1", name: "${vars.nothing}", free: 010}
    data: {_target_: models.Dat}
    trainer: {max_epoch: 3, seed: "???", precision: fp17}
    """
    assert problems(recipe("trainer", text=text)) == (
        'module.free: YAML reads 010 as 8 (line 3); write 10 for the number or "010" for a string.',
        "trainer: not an override; write key=value, for example trainer.max_epochs=3.",
        "trainer.seed: must be given, it is ??? in the recipe; add trainer.seed=VALUE.",
        "module.name: ${vars.nothing} points to nothing.",
        "modul: unknown key; did you mean module?",
        "module.lrr: unknown key; did you mean lr?",
        'module.lr: wants float, got the str "0.1"; drop the quotes.',
        "module.width: missing; models.Net needs it.",
        "data._target_: models has no Dat; did you mean Data?",
        "trainer.max_epoch: unknown key; did you mean max_epochs?",
        'trainer.precision: wants "fp32", "bf16", "fp16" or Precision, got the str "fp17".',
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch: unknown key; did you mean max_epochs?"),
        ("trainer.maxEpochs=3", "trainer.maxEpochs: unknown key; did you mean max_epochs?"),
        ("max_epochs=3", "max_epochs: unknown key; did you mean trainer.max_epochs?"),
        ("module.lrr=1", "module.lrr: unknown key; did you mean lr?"),
        ("data.zzz=1", "data.zzz: unknown key; models.Data takes batch_size."),
        ("zzz=1", "zzz: unknown key; a recipe has module, data, trainer, vars."),
        ("trainer._target_=x", "trainer._target_: unknown key; the Trainer takes accelerator, "),
    ],
)
def test_unknown_keys(recipe: Load, override: str, expected: str) -> None:
    """Case B101: in the trainer, a module's arguments and at the top."""
    assert problem(recipe(override)).startswith(expected)
    key, _, value = override.partition("=")
    yaml = f"{key}: {value}"
    for section in reversed(key.split(".")[:-1]):
        yaml = f"{section}: {{{key.split('.')[-1]}: {value}}}"
        text = "module: {_target_: models.Net, width: 3}\ndata: {_target_: models.Data}\n"
        if section in ("module", "data"):
            text = text.replace("}", f", {key.split('.')[-1]}: {value}}}")
            yaml = ""
        assert [p for p in problems(recipe(text=text, more=yaml)) if p.startswith(expected)]


def test_keyword_arguments_take_anything(recipe: Load) -> None:
    plan = check_recipe(recipe("module._target_=models.Loose", "module.whatever=3"))
    assert plan.module.arguments == {"width": 3, "whatever": 3}
    expected = "module._partial_: unknown key; models.Loose takes no arguments."
    assert problem(recipe("module._target_=models.Loose", "module._partial_=true")) == expected


def test_missing_sections(recipe: Load) -> None:
    assert problems(recipe(text="trainer: {max_epochs: 3}")) == (
        "module: missing; name a Module with _target_: digits.DigitsNet.",
        "data: missing; name a DataModule with _target_: digits.Digits.",
    )
    assert problems(recipe(text="module: models.Net\ndata: {target: models.Data}\ntrainer: 3")) == (
        "module._target_: missing; name a class, like digits.DigitsNet.",
        "data._target_: missing; write _target_ for target.",
        "trainer: wants a mapping of arguments, like max_epochs: 10.",
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('trainer.max_epochs="2"', 'wants int or null, got the str "2"; drop the quotes.'),
        ("trainer.max_epochs=2.0", "wants int or null, got the float 2.0; write 2."),
        ("trainer.max_epochs=true", "wants int or null, got the bool true."),
        ("trainer.max_epochs=2.5", "wants int or null, got the float 2.5."),
        ("trainer.enable_progress_bar=1", "wants bool, got the int 1."),
        ("trainer.accelerator=gpu", 'wants "auto", "cpu" or "cuda", got the str "gpu".'),
        ("trainer.run_dir=3", "wants str, Path or null, got the int 3; put it in quotes."),
        ("trainer.accumulate=4.0", "int, mapping of int to int or Accumulator, got the float"),
        ("trainer.callbacks=3", "wants list of minitrainer.Callback, got the int 3."),
        ("trainer.strategy=ddp", 'wants Strategy or null, got the str "ddp".'),
        ("module.lr=fast", 'wants float, got the str "fast".'),
        ("module.lr='1e-4'", 'wants float, got the str "1e-4"; drop the quotes.'),
        ("module.lr=no", "wants float, got the bool false."),
        ("module.name=on", "wants str, got the bool true; YAML reads yes, no, on and off as bools"),
        ("module.name=3", "wants str, got the int 3; put it in quotes."),
        ("module.activation=rely", 'wants "relu" or "gelu", got the str "rely".'),
        ("module.betas=[1]", "wants list of 2 (float, float), got the list [1]."),
        ("module.betas=0.9", "wants list of 2 (float, float), got the float 0.9."),
        ("module.color=GREEN", 'wants RED or BLUE, got the str "GREEN".'),
        ("module.root=3", "wants Path or null, got the int 3; put it in quotes."),
        ("module.inner=relu", 'wants Module or null, got the str "relu".'),
        ("module.bias=null", "wants bool, got null."),
        ("module.sizes=abc", 'wants list of int or null, got the str "abc".'),
    ],
)
def test_wrong_types(recipe: Load, override: str, expected: str) -> None:
    """Case B102: judged by the annotations; a quoted number is said to be one."""
    key = override.partition("=")[0]
    said = problem(recipe(override))
    assert said.startswith(f"{key}: ")
    assert expected in said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("module.betas=[1, x]", 'module.betas.1: wants float, got the str "x".'),
        ("module.sizes=[1, 2, 3.0]", "module.sizes.2: wants int, got the float 3.0; write 3."),
        ("module.table={a: x}", 'module.table.a: wants int, got the str "x".'),
        ("trainer.accumulate={a: 1}", 'trainer.accumulate.<key>: wants int, got the str "a".'),
        ("trainer.accumulate={0: x}", 'trainer.accumulate.0: wants int, got the str "x".'),
        ("trainer.callbacks=[3]", "trainer.callbacks.0: wants minitrainer.Callback, got "),
    ],
)
def test_a_wrong_part_is_named_by_its_own_path(recipe: Load, override: str, expected: str) -> None:
    assert problem(recipe(override)).startswith(expected)


def test_int_and_float_stay_what_they_are(recipe: Load) -> None:
    """Case B102: val_check_interval 1 is every step, 1.0 the end of the epoch (B108)."""
    for text, value in (("1", 1), ("1.0", 1.0), ("0.5", 0.5)):
        plan = check_recipe(recipe(f"trainer.val_check_interval={text}"))
        assert repr(plan.trainer["val_check_interval"]) == repr(value)
        assert check_recipe(recipe(f"module.lr={text}")).module.arguments["lr"] == value


def test_values_that_yaml_cannot_write(recipe: Load) -> None:
    """Lists become tuples, strings paths and members of an Enum, where the annotation says so."""
    plan = check_recipe(
        recipe(
            *("module.betas=[0, 1.0]", "module.root=data/x", "module.color=BLUE"),
            *("module.sizes=[1, 2]", "module.implicit=null", "module.unknown=[1]"),
            *("module.free={a: [1]}", "trainer.run_dir=x"),
        )
    )
    arguments = plan.module.arguments
    assert arguments["betas"] == (0, 1.0)
    assert arguments["root"] == Path("data/x")
    assert arguments["color"] is sys.modules["models"].Color.BLUE
    assert arguments["sizes"] == [1, 2]
    assert arguments["free"] == {"a": [1]}
    assert plan.trainer["run_dir"] == "x"
    assert check_recipe(recipe("module.color=b")).module.arguments["color"].name == "BLUE"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("models.Nett", "models has no Nett; did you mean Net?"),
        ("model.Net", "there is no module model; did you mean models?"),
        ("zzzzz.Net", "there is no module zzzzz in "),
        ("Net", "Net does not say in which file it is; write models.Net."),
        ("models", "models is a file; name a class in it: models.CLASS."),
        ("torch.nn", "torch.nn is a module; name a class in it: torch.nn.CLASS."),
        ("torch.nn.Linaer", "torch.nn has no Linaer; did you mean Linear?"),
        ("minitrainer.EarlyStoping", "minitrainer has no EarlyStoping; did you mean EarlyStopp"),
        ("models.Net.", "'models.Net.' is not a dotted name like digits.DigitsNet."),
        ("models.HalfNet", "models.HalfNet has no configure_optimizers; write it."),
        ("models.PlainNet", "models.PlainNet is not a subclass of minitrainer.Module."),
        ("models.Data", "models.Data is not a subclass of minitrainer.Module."),
        ("models.make_linear", "models.make_linear is not a subclass of minitrainer.Module."),
        ("models.make_anything", "models.make_anything is a function; wanted is minitrainer."),
        ("torch.nn.Linear", "torch.nn.Linear is not a subclass of minitrainer.Module."),
        ("os.system", "os.system is refused: a recipe may build what is defined beside it or "),
    ],
)
def test_wrong_targets(recipe: Load, target: str, expected: str) -> None:
    text = f"module: {{_target_: {target}}}\ndata: {{_target_: models.Data}}"
    assert problem(recipe(text=text)).startswith(f"module._target_: {expected}")


def test_places_want_their_own_kinds(recipe: Load) -> None:
    more = """
trainer:
  callbacks: [{_target_: models.Net}, {_target_: models.make_anything}, {_target_: models.Pair}]
  loggers: [{_target_: models.HalfStrategy}]
  strategy: {_target_: models.HalfStrategy}
  precision: {_target_: models.NullLogger}
  accumulate: {_target_: models.NullLogger}
  checkpoint_io: {_target_: minitrainer.CSVLogger}
"""
    assert problems(recipe("data._target_=models.Net", more=more)) == (
        "data._target_: models.Net is not a subclass of minitrainer.DataModule.",
        "trainer.callbacks.0._target_: models.Net is not a subclass of minitrainer.Callback.",
        "trainer.callbacks.1._target_: models.make_anything is a function; wanted is "
        "minitrainer.Callback.",
        "trainer.loggers.0._target_: models.HalfStrategy is not a Logger: it has no start, "
        "log_metrics, log_hyperparameters, finish.",
        "trainer.strategy._target_: models.HalfStrategy is not a Strategy: it has no "
        "training_step, agree, sync_buffers, teardown.",
        "trainer.precision._target_: models.NullLogger is not a Precision: it has no setup, "
        "autocast, backward, unscale, step.",
        "trainer.accumulate._target_: models.NullLogger is not a Accumulator: it has no "
        "window_size, windows.",
        "trainer.checkpoint_io._target_: minitrainer.CSVLogger is not a CheckpointIO: it has no "
        "save, load, verify, remove, exists.",
    )


def test_right_kinds_are_accepted(recipe: Load) -> None:
    more = """
trainer:
  callbacks:
    - {_target_: models.Pair, first: {_target_: models.make_linear, size: 2}}
    - {_target_: models.make_callback}
    - {_target_: minitrainer.EarlyStopping, monitor: loss}
  loggers: [{_target_: models.NullLogger}]
  strategy: {_target_: minitrainer.DDPStrategy}
  precision: {_target_: minitrainer.AMPPlugin, precision: bf16}
  accumulate: {_target_: minitrainer.Accumulator, size: 2}
  checkpoint_io: {_target_: minitrainer.CheckpointIO}
"""
    for inner in ("models.make_linear, size: 2", "torch.nn.ReLU", "models.PlainNet"):
        plan = check_recipe(recipe(f"module.inner={{_target_: {inner}}}", more=more))
    assert plan.trainer["callbacks"][0].arguments["first"].name == "models.make_linear"


@pytest.mark.parametrize(
    "target",
    [
        *("os.system", "builtins.eval", "subprocess.Popen", "subprocess.run", "shutil.rmtree"),
        *("models.system", "models.os.system", "models.subprocess.Popen", "functools.partial"),
        *("pathlib.Path", "torch.load", "torch.hub.load", "torch.nn.functional.relu"),
        *("models.Color.RED", "builtins.print", "importlib.import_module", "json.JSONDecoder"),
    ],
)
def test_what_a_recipe_must_not_call(
    recipe: Load, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by name, at any depth, and never called."""
    monkeypatch.setattr("os.system", lambda command: pytest.fail("was called"))
    said = problem(recipe(f"module.free=[{{a: {{_target_: {target}, command: ls}}}}]"))
    assert said.startswith(f"module.free.0.a._target_: {target} is refused: a recipe may build")


def test_exceptions_while_importing(recipe: Load, tmp_path: Path) -> None:
    for name, text, expected in (
        ("zero", "x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero (zero.py:2)"),
        ("broken", "def f(:\n", "SyntaxError: invalid syntax (broken.py:1)"),
        ("needs", "\nimport zzzzz\n", "ModuleNotFoundError: No module named 'zzzzz' (needs.py:2)"),
        ("leaves", "import sys\nsys.exit(3)\n", "SystemExit: 3 (leaves.py:2)"),
        ("outer", "import zero\n", "ZeroDivisionError: division by zero (zero.py:2)"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        said = problem(recipe(f"module._target_={name}.Net", f"data._target_={name}.Data"))
        assert said == f"module._target_: importing {name} failed: {expected}."


def test_the_folder_of_the_recipe_is_importable_once(recipe: Load, tmp_path: Path) -> None:
    for _ in range(2):
        check_recipe(recipe())
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_two_recipes_in_one_process_have_their_own_files(recipe: Load, tmp_path: Path) -> None:
    first = check_recipe(recipe()).module.target
    other = tmp_path / "other"
    other.mkdir()
    for name in ("models.py", "recipe.yaml"):
        (other / name).write_text((tmp_path / name).read_text())
    second = check_recipe(load_recipe(other / "recipe.yaml")).module.target
    assert first is not second
    assert sys.modules["models"].__file__ == str(other / "models.py")
    again = check_recipe(load_recipe(other / "recipe.yaml")).module.target
    assert again is second, "a file is imported once"


def test_a_file_named_like_a_module_of_python(recipe: Load, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("class Net: ...")
    said = problem(recipe("module._target_=random.Net"))
    assert said == (
        "module._target_: random has no Net: it is not random.py beside the recipe, but the "
        "module random of Python or of a package; give the file another name."
    )


def test_a_package_that_is_installed_below_the_recipe_is_not_the_users(
    recipe: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "foreign.py").write_text("def run(): ...\nclass Thing: ...")
    monkeypatch.syspath_prepend(packages)
    for name in ("foreign.run", "foreign.Thing"):
        assert " is refused: " in problem(recipe(f"module.free={{_target_: {name}}}"))
