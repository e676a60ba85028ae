"""Performance: settings that cost time, or do nothing."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="F20",
        title="Each rank computes with one thread, or with those of the whole machine",
        symptom=(
            "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, "
            "to avoid your system being overloaded."
        ),
        patterns=("Setting OMP_NUM_THREADS environment variable",),
        cause=(
            "torchrun sets it to 1 when nobody has, on any number of cores; other launchers "
            "leave each rank as many threads as the machine has cores."
        ),
        remedy=(
            "Each of several ranks gets its share of the cores that it may use. OMP_NUM_THREADS "
            "of the user is respected, except a 1 under torchrun, which cannot be told from "
            "torchrun's own."
        ),
        component="minitrainer.launch.device.set_threads",
        test="tests/launch/test_device.py::test_threads",
        plain="tests/pitfalls/test_performance.py::test_plain_torchrun_gives_each_rank_one_thread",
        rows=("C6",),
    ),
    Entry(
        code="F21",
        title="Pinned memory and non_blocking are of use together only",
        symptom=(
            "UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then "
            "device pinned memory won't be used."
        ),
        patterns=("'pin_memory' argument is set as true but no accelerator",),
        cause=(
            "A copy does not block only if it comes from pinned memory; pinning costs time where "
            "there is no GPU."
        ),
        remedy=(
            "The loader's pin_memory is kept where there is a GPU and dropped where there is "
            "none; batches of any nesting are moved by one function, without blocking."
        ),
        fix="Set pin_memory=True on the loader; it is not switched on for you.",
        component="minitrainer.data.transfer.move_to_device",
        test=(
            "tests/data/test_training.py::"
            "test_pinning_without_a_gpu_and_out_of_order_batches_are_not_kept"
        ),
        plain="tests/pitfalls/test_performance.py::test_plain_pinning_without_a_gpu_warns",
        rows=("B9", "B11", "B17"),
        unproven=(
            "That copies overlap with work: on a GPU, the share of time that steps wait for "
            "data, with and without pin_memory."
        ),
    ),
    Entry(
        code="F22",
        title="DataParallel: one process for all GPUs",
        symptom="GPU 0 holds more than the others and waits for Python; adding GPUs hardly helps.",
        cause=(
            "torch.nn.DataParallel copies the model to all devices in every step, and gathers "
            "outputs on the first one, in one process with one interpreter lock."
        ),
        remedy="It is not offered: each rank is a process with a device of its own, under DDP.",
        fix="Take DataParallel out of your module; set `devices`.",
        component="minitrainer.plugins.ddp.DDPStrategy",
        test="tests/training/test_ranks_agree.py::test_layouts_end_with_the_same_weights_and_order",
        rows=("B1",),
        unproven=(
            "Without a GPU DataParallel runs the module as it is. On 2 GPUs, samples per second "
            "and memory of both, against DDP."
        ),
    ),
    Entry(
        code="F23",
        title="Steps wait for data, or loader workers wait for cores",
        symptom=(
            "UserWarning: This DataLoader will create 16 worker processes in total. Our suggested "
            "max number of worker in current system is 8. Or no message, and idle GPUs."
        ),
        patterns=("This DataLoader will create \\d+ worker processes in total",),
        cause=(
            "num_workers counts per rank: 8 of them on each of 8 ranks are 64 processes. Too few "
            "leave the step waiting for its batch."
        ),
        remedy=(
            "`doctor recipe.yaml` multiplies workers by the local ranks and compares them with "
            "the cores, and says what share of a step is spent waiting for data."
        ),
        fix="Set num_workers so that workers and ranks fit into the cores of a machine.",
        component="minitrainer.doctor.shares.Shares",
        test="tests/doctor/test_recipe.py::test_a_planted_fault_is_found",
        plain="tests/pitfalls/test_performance.py::test_plain_loaders_count_their_own_workers_only",
        rows=("B10",),
    ),
)
