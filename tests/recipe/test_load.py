"""Recipe files and overrides to plain values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minitrainer.errors import RecipeError
from minitrainer.recipe.load import Recipe, load_recipe


def load(text: str, *overrides: str) -> Recipe:
    Path("recipe.yaml").write_text(text)
    return load_recipe("recipe.yaml", overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_values_are_plain_and_resolved() -> None:
    recipe = load(
        """
        vars: {width: 8, name: x}
        module: {width: "${vars.width}", twice: ["${vars.width}", "a-${vars.name}"]}
        copy: ${module}
        """
    )
    assert recipe.problems == ()
    assert recipe.config["copy"] == {"width": 8, "twice": [8, "a-x"]}
    assert type(recipe.config["copy"]) is dict
    assert recipe.path == Path.cwd() / "recipe.yaml"
    assert recipe.folder == Path.cwd()


def test_paths_are_absolute_at_once() -> None:
    """Case B5: user code that changes the working directory later moves nothing."""
    Path("sub").mkdir()
    Path("sub/recipe.yaml").write_text("trainer: {}")
    recipe = load_recipe("sub/recipe.yaml")
    here = Path.cwd()
    os.chdir("/")
    assert recipe.path == here / "sub" / "recipe.yaml"
    assert recipe.folder == here / "sub"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5e3", 500.0),
        ("1.", 1.0),
        ("-.inf", float("-inf")),
        ("1_000", 1000),
        ("+1", 1),
        ("-1", -1),
        ("0", 0),
        ("0.10", 0.1),
        ("1.0", 1.0),
        ("true", True),
        ("null", None),
        ("~", None),
        ('"010"', "010"),
        ("'1:30'", "1:30"),
        ("00:30", "00:30"),
        ("2001-01-01", "2001-01-01"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("[1, 1.0, a]", [1, 1.0, "a"]),
        ("{a: 1}", {"a": 1}),
        ("{0: 4, 5: 1}", {0: 4, 5: 1}),
    ],
)
def test_numbers_are_what_they_look_like(text: str, value: object) -> None:
    """Case B102: in YAML and on the command line; 1 stays int and 1.0 stays float."""
    for recipe in (load(f"module: {{a: {text}}}"), load("module: {a: x}", f"module.a={text}")):
        assert recipe.problems == ()
        assert repr(recipe.config["module"]["a"]) == repr(value)


@pytest.mark.parametrize(
    ("text", "made", "meant"),
    [
        ("010", "8", "10"),
        ("-010", "-8", "-10"),
        ("007", "7", "7"),
        ("08", 'the string "08"', "8"),
        ("00", "0", "0"),
        ("0x1F", "31", "31"),
        ("0b11", "3", "3"),
        ("0o17", 'the string "0o17"', "15"),
        ("1:30", "90", "90"),
        ("1:30.5", "90.5", "90.5"),
    ],
)
def test_surprising_numbers_are_refused(text: str, made: str, meant: str) -> None:
    """Case B102: 010 is never 8 in silence; the message says what YAML makes of it."""
    rest = f'write {meant} for the number or "{text}" for a string.'
    recipe = load(f"trainer:\n  a: 1\n  seed: {text}\n")
    assert recipe.problems == (f"trainer.seed: YAML reads {text} as {made} (line 3); {rest}",)
    recipe = load("trainer: {}", f"trainer.seed={text}")
    assert recipe.problems == (f"trainer.seed: YAML reads {text} as {made}; {rest}",)
    recipe = load("trainer: {}", f"trainer.list=[1, {text}]")
    assert recipe.problems == (f"trainer.list.1: YAML reads {text} as {made}; {rest}",)


def test_anchors_and_merge_keys() -> None:
    recipe = load(
        """
        vars: {base: &base {a: 1, b: 2}, more: &more {b: 3, c: 3}}
        module: {<<: *base, b: 5}
        data: {<<: [*base, *more]}
        trainer: *base
        """,
        "trainer.a=7",
    )
    assert recipe.problems == ()
    assert recipe.config["module"] == {"a": 1, "b": 5}
    assert recipe.config["data"] == {"a": 1, "b": 2, "c": 3}
    assert recipe.config["trainer"] == {"a": 7, "b": 2}
    assert recipe.config["vars"]["base"] == {"a": 1, "b": 2}, "an alias is a copy"


def test_overrides_change_the_recipe() -> None:
    recipe = load(
        """
        module: {_target_: m.Net, lr: 1, text: x, sizes: {a: 1}}
        trainer: {callbacks: [{_target_: m.C, patience: 1}], accumulate: {0: 4}}
        """,
        "trainer.max_epochs=3",
        "module.lr=1e-5",
        "module.text=a=b",
        "module.new=null",
        "module.sizes.a=-1",
        "trainer.callbacks.0.patience=3",
        "trainer.callbacks.0.mode=max",
        "trainer.accumulate.0=8",
        "data._target_=m.Data",
        "module.copy=${module.lr}",
    )
    assert recipe.problems == ()
    assert recipe.config == {
        "module": {
            **{"_target_": "m.Net", "lr": 1e-5, "text": "a=b", "sizes": {"a": -1}},
            **{"new": None, "copy": 1e-5},
        },
        "trainer": {
            "callbacks": [{"_target_": "m.C", "patience": 3, "mode": "max"}],
            "accumulate": {0: 8},
            "max_epochs": 3,
        },
        "data": {"_target_": "m.Data"},
    }
    assert load("trainer: {callbacks: [1, 2]}", "trainer.callbacks=[]").config["trainer"] == {
        "callbacks": []
    }


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("max_epochs", "max_epochs: not an override; write key=value, for example "),
        ("=3", "=3: not an override"),
        ("a..b=3", "a..b=3: not an override"),
        ("module.lr=", 'module.lr: no value after "="; write module.lr=null or '),
        ("module.lr=[1", "module.lr: invalid YAML: "),
        ("module.lr=@x", "put the value in quotes."),
        ("modul.lr=1", "modul: no such key in the recipe; did you mean module?"),
        ("optimizer.lr=1", "optimizer: no such key in the recipe; it has module, data, trainer"),
        ("module.lr.x=1", "module.lr.x: module.lr is 1, which has no keys."),
        ("module.sizes.b=1", "module.sizes.b: no such key in the recipe; "),
        ("trainer.callback.0.patience=1", "trainer.callback: no such key in the recipe; did you "),
        ("trainer.callbacks.1.patience=1", "trainer.callbacks.1: the list has 1 items"),
        ("trainer.callbacks.x=1", "trainer.callbacks.x: the list has 1 items"),
        ("vars.widht=1", "vars.widht: nothing in the recipe uses it; did you mean width?"),
    ],
)
def test_wrong_overrides_are_named(override: str, problem: str) -> None:
    """Case B101: nothing that is set is set in silence at a place where nobody looks."""
    recipe = load(
        """
        vars: {width: 1}
        module: {lr: 1, sizes: {a: 1}}
        trainer: {callbacks: [{patience: 1}]}
        """,
        override,
    )
    assert len(recipe.problems) == 1
    assert problem in recipe.problems[0]


def test_a_variable_may_come_from_the_command_line_alone() -> None:
    recipe = load("module: {lr: '${vars.lr}'}", "vars.lr=1e-3")
    assert recipe.problems == ()
    assert recipe.config["module"]["lr"] == 1e-3


def test_all_dangling_references_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    recipe = load(
        """
        vars: {width: 1}
        module: {a: "${vars.widht}", b: ["${nothing}"], c: "${module.d}", d: "${module.c}"}
        data: {a: "${oc.env:NOT_SET}", b: "echo ${", c: "${data.a}", d: "${vars.width}"}
        """
    )
    assert recipe.problems == (
        "data.b: echo ${ is not a valid reference; write ${vars.name}, or \\${ for the "
        "characters themselves.",
        "module.a: ${vars.widht} points to nothing; did you mean vars.width?",
        "module.b.0: ${nothing} points to nothing.",
        "module.c: ${module.d} cannot be resolved: Recursive interpolation detected.",
        "module.d: ${module.c} cannot be resolved: Recursive interpolation detected.",
        "data.a: ${oc.env:NOT_SET} cannot be resolved: KeyError raised while resolving "
        "interpolation: \"Environment variable 'NOT_SET' not found\".",
        "data.c: ${data.a} cannot be resolved: KeyError raised while resolving "
        "interpolation: \"Environment variable 'NOT_SET' not found\".",
    )
    assert recipe.config["data"]["d"] == 1


def test_missing_values_are_reported_where_they_are_missing() -> None:
    text = "vars:\n  lr: ???\nmodule: {lr: '${vars.lr}', sizes: [1, '???']}"
    assert load(text).problems == (
        "vars.lr: must be given, it is ??? in the recipe; add vars.lr=VALUE.",
        "module.sizes.1: must be given, it is ??? in the recipe; add module.sizes.1=VALUE.",
    )
    recipe = load(text, "vars.lr=2", "module.sizes.1=3")
    assert recipe.problems == ()
    assert recipe.config["module"] == {"lr": 2, "sizes": [1, 3]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("module: {a: 1\ntrainer: 3", "recipe.yaml: invalid YAML in line 2, column "),
        ("module:\n\ta: 1", "found character '\\t' that cannot start any token; indent with"),
        ("a: 1\na: 2\nb: {c: 1, c: 2}", "a: given twice (lines 1 and 2); keep one of them."),
        ("a: 1\na: 2\nb: {c: 1, c: 2}", "b.c: given twice (lines 3 and 3); keep one of them."),
        ("on: 1", "the key on is neither a string nor an int to YAML, but bool (line 1); put it"),
        ("a: &x [*x]", "a.0: the alias refers to itself."),
        ("", "recipe.yaml: the recipe is empty"),
        ("- 1", "recipe.yaml: a recipe is a mapping with module, data, trainer, not a list."),
        ("3", "recipe.yaml: a recipe is a mapping with module, data, trainer, not 3."),
        ("a: 1\n---\nb: 1", "expected a single document"),
    ],
)
def test_unreadable_recipes(text: str, problem: str) -> None:
    assert problem in refusal(text)


@pytest.mark.parametrize("value", ["!!python/object/apply:os.system [x]", "!foo x", "!!int '7'"])
def test_tags_run_nothing(value: str) -> None:
    (problem,) = load(f"module: {{a: {value}}}").problems
    assert problem.startswith("module.a: the tag !")
    assert "is not supported; leave it out (line 1)." in problem


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text("a: 1")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, reason in (
        ("digit.yaml", "digit.yaml: no such file; did you mean digits.yaml?"),
        ("zzzz", "zzzz: no such file."),
        ("sub/digits.yaml", "digits.yaml: no such folder."),
        (".", ": a folder, not a recipe; it holds binary.yaml, digits.yaml."),
        ("binary.yaml", "binary.yaml: not a text file in UTF-8 (byte 0)."),
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / name)
        assert str(caught.value).endswith(reason)
