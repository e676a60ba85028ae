"""Who am I, on which device, and how are the ranks of this machine started and stopped."""

from minitrainer.launch.device import (
    check_devices,
    check_identities,
    device_identity,
    pick_device,
    set_threads,
    threads_per_rank,
)
from minitrainer.launch.environment import Environment, strip_local_rank
from minitrainer.launch.local import run_on_local_ranks
from minitrainer.launch.signals import Interrupted, StopSignals

__all__ = [
    "Environment",
    "Interrupted",
    "StopSignals",
    "check_devices",
    "check_identities",
    "device_identity",
    "pick_device",
    "run_on_local_ranks",
    "set_threads",
    "strip_local_rank",
    "threads_per_rank",
]
