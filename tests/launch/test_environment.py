"""Environment.detect, export and strip_local_rank."""

from __future__ import annotations

import pytest

from minitrainer.errors import IncompleteEnvironmentError, PortError
from minitrainer.launch import Environment, strip_local_rank
from minitrainer.launch.environment import first_host, wished_port

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NODELIST": "n[001-003,7],m2",
}


def changed(base: dict[str, str], **changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Environment()),
        (TORCHRUN, Environment(5, 1, 1, 8, 4, "torchrun", "host", 29500)),
        (
            changed(TORCHRUN, TORCHELASTIC_RUN_ID=None, GROUP_RANK=None),
            Environment(5, 1, 1, 8, 4, "environment", "host", 29500),
        ),
        (
            changed(TORCHRUN, MINITRAINER_LAUNCHER="local"),
            Environment(5, 1, 1, 8, 4, "local", "host", 29500),
        ),
        # Set by hand, without LOCAL_WORLD_SIZE: all on one node.
        (
            {
                "RANK": "1",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
            },
            Environment(1, 1, 0, 2, 2, "environment", "a", 1),
        ),
        # A wish for the ranks that we start ourselves, not half an environment (case B1).
        ({"MASTER_PORT": "29511"}, Environment()),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}, Environment()),
        (SLURM, Environment(2, 0, 1, 3, 1, "slurm", "n001", 14711)),
        (
            changed(SLURM, SLURM_NODEID="0", SLURM_PROCID="1", SLURM_LOCALID="1"),
            Environment(1, 1, 0, 3, 2, "slurm", "n001", 14711),
        ),
        (
            changed(SLURM, MASTER_ADDR="head", MASTER_PORT="1234", WORLD_SIZE="3"),
            Environment(2, 0, 1, 3, 1, "slurm", "head", 1234),
        ),
        # An interactive shell, one task, a batch script outside srun.
        (changed(SLURM, SLURM_JOB_NAME="bash"), Environment()),
        (changed(SLURM, SLURM_JOB_NAME="interactive"), Environment()),
        (changed(SLURM, SLURM_NTASKS="1"), Environment()),
        (changed(SLURM, SLURM_STEP_ID=None), Environment()),
        # torchrun inside a SLURM step is torchrun.
        ({**SLURM, **TORCHRUN}, Environment(5, 1, 1, 8, 4, "torchrun", "host", 29500)),
    ],
)
def test_environments(environ: dict[str, str], expected: Environment) -> None:
    assert Environment.detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (changed(TORCHRUN, RANK=None), ["RANK is not", "WORLD_SIZE and LOCAL_RANK are set"]),
        (changed(TORCHRUN, MASTER_ADDR=None, MASTER_PORT=""), ["MASTER_ADDR and MASTER_PORT are"]),
        (changed(TORCHRUN, LOCAL_RANK=None), ["LOCAL_RANK is not", "torchrun or srun"]),
        ({"WORLD_SIZE": "2"}, ["RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not"]),
        (changed(TORCHRUN, RANK="8"), ["RANK is 8 and WORLD_SIZE is 8"]),
        (changed(TORCHRUN, LOCAL_RANK="4"), ["LOCAL_RANK is 4 and LOCAL_WORLD_SIZE is 4"]),
        (changed(TORCHRUN, RANK="0"), ["LOCAL_RANK is 1 and RANK is 0"]),
        (changed(TORCHRUN, LOCAL_WORLD_SIZE="9"), ["LOCAL_WORLD_SIZE is 9 and WORLD_SIZE is 8"]),
        (changed(TORCHRUN, RANK="one"), ["RANK is 'one'"]),
        (changed(TORCHRUN, RANK="-1"), ["RANK is '-1'"]),
        (changed(TORCHRUN, WORLD_SIZE="0"), ["WORLD_SIZE is '0'", "1 or more"]),
        (changed(TORCHRUN, MASTER_PORT="65536"), ["MASTER_PORT is 65536"]),
        (changed(SLURM, SLURM_LOCALID=None), ["3 tasks", "SLURM_LOCALID is not"]),
        (changed(SLURM, SLURM_JOB_NODELIST=None), ["SLURM_JOB_NODELIST is not"]),
        (changed(SLURM, WORLD_SIZE="4"), ["WORLD_SIZE is 4, but SLURM says 3"]),
    ],
)
def test_half_an_environment_is_an_error(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(IncompleteEnvironmentError) as raised:
        Environment.detect(environ)
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_export_sets_what_slurm_does_not_and_puts_it_back() -> None:
    environ = {"MASTER_PORT": "7", "OTHER": "x"}
    with Environment(2, 0, 1, 3, 1, "slurm", "n001", 7).export(environ):
        assert environ == {
            "RANK": "2",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "n001",
            "MASTER_PORT": "7",
            "OTHER": "x",
        }
    assert environ == {"MASTER_PORT": "7", "OTHER": "x"}
    for environment in (Environment(), Environment.detect(TORCHRUN)):
        with environment.export(environ):
            assert environ == {"MASTER_PORT": "7", "OTHER": "x"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n[001-003,7],m2", "n001"),
        ("n5", "n5"),
        ("a,b", "a"),
        ("gpu-[3,9]", "gpu-3"),
        ("r[1-2]n", "r1n"),
    ],
)
def test_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_wished_port() -> None:
    assert wished_port({}) == wished_port({"MASTER_PORT": ""}) == 0
    assert wished_port({"MASTER_PORT": "29511"}) == 29511
    assert wished_port(TORCHRUN) == 0
    for nonsense in ("x", "0", "65536", "-5"):
        with pytest.raises(PortError, match="MASTER_PORT"):
            wished_port({"MASTER_PORT": nonsense})


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["fit", "--local-rank=1", "r.yaml"], ["fit", "r.yaml"]),
        (["--local_rank=0", "fit"], ["fit"]),
        (["fit", "r.yaml", "--local_rank", "0"], ["fit", "r.yaml"]),
        (["fit", "--local-rank", "1", "a=b"], ["fit", "a=b"]),
        (["fit", "--local-rank"], ["fit"]),
        (["fit", "--local-ranks=2", "local_rank=1"], ["fit", "--local-ranks=2", "local_rank=1"]),
        ([], []),
    ],
)
def test_strip_local_rank(argv: list[str], kept: list[str]) -> None:
    """Case B115: both spellings, both forms."""
    assert strip_local_rank(argv) == kept
