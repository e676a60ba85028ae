"""Launch: starting ranks, finding one's place among them, and ending them."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="L01",
        title="Only some of the launcher's variables are set",
        symptom=(
            "ValueError: Error initializing torch.distributed using env:// rendezvous: "
            "environment variable MASTER_ADDR expected, but not set. Or nothing at all: a script "
            "that takes 1 for a missing WORLD_SIZE trains as many separate models as there are "
            "processes."
        ),
        patterns=(r"environment variable \w+ expected, but not set",),
        cause=(
            "A process learns its rank and where to meet the others from RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A shell, a container or a job script "
            "passed on some of them; torch names the missing ones one at a time."
        ),
        remedy=(
            "The environment is read in one place before anything else: none of the variables "
            "means one process, all of them a launcher, and half of them is an error that lists "
            "what is missing. Numbers that contradict each other, or SLURM, are errors too."
        ),
        fix="Start all ranks by torchrun or srun, or unset the variables and set `devices`.",
        component="minitrainer.launch.environment.Environment",
        test="tests/launch/test_environment.py::test_half_an_environment_is_an_error",
        plain="tests/pitfalls/test_launch.py::test_plain_init_names_one_missing_variable_at_a_time",
        rows=("A6", "A14"),
    ),
    Entry(
        code="L02",
        title="Another number of devices than there are, or than the launcher started",
        symptom=(
            "CUDA error: invalid device ordinal; or a recipe that says 4 devices runs on the 2 "
            "that torchrun was given, and nobody notices."
        ),
        patterns=("invalid device ordinal",),
        cause=(
            "world_size is a number of processes, not of GPUs, and it is set in two places: the "
            "launcher's command and the settings."
        ),
        remedy=(
            "Before a process is started the number asked for is compared with the GPUs that "
            "there are; under a launcher it must be the launcher's number, or be left out."
        ),
        fix="Leave `devices` out under torchrun and SLURM.",
        component="minitrainer.launch.device.check_devices",
        test="tests/launch/test_device.py::test_devices_other_than_the_launcher_gave",
        rows=("A12",),
        unproven="The message of CUDA: on GPUs, torch.cuda.set_device(8) on a machine with 4.",
    ),
    Entry(
        code="L03",
        title="CUDA was used before local ranks are forked",
        symptom="RuntimeError: Cannot re-initialize CUDA in forked subprocess.",
        patterns=(
            "in forked subprocess",
            "in combination with fork-based multiprocessing",
            "CUDA error: initialization error",
        ),
        cause=(
            "A forked process can use neither CUDA nor autograd's GPU threads of its parent. "
            "torch.cuda.is_available() is enough to start CUDA."
        ),
        remedy=(
            "`fit` refuses to fork where CUDA has been started, and turns torch's message in a "
            "rank into this error."
        ),
        fix=(
            "Start by `python -m minitrainer fit` or torchrun, or keep the script off the GPU "
            "before `fit`."
        ),
        component="minitrainer.launch.fork.fork_problem",
        test="tests/launch/test_local.py::test_when_forking_is_refused",
        unproven=(
            "Plain torch: without a GPU there is no CUDA to start. On GPUs, a tensor on the "
            "device and then os.fork."
        ),
    ),
    Entry(
        code="L04",
        title="One rank raised or died, and the others tell of a broken connection",
        symptom=(
            "RuntimeError: ... Connection closed by peer [127.0.0.1]:34196. This is typically "
            "caused by a remote worker crashing. Or the others wait until the timeout, and under "
            "NCCL the watchdog ends them."
        ),
        patterns=(
            "Connection (closed|reset) by peer",
            "Broken pipe",
            "caused pair closure",
            "NCCL communicator was aborted",
            "ncclRemoteError|remote process exited",
            "ChildFailedError",
            r"exited with exit code|exitcode *: *-?\d+",
        ),
        cause=(
            "Ranks wait for each other in every reduction. When one is gone the others find a "
            "closed connection, or nothing, and their message often hides the first one's."
        ),
        remedy=(
            "Local ranks are watched: when one fails all others end within seconds, and the "
            "error is that of the rank which failed first, with its own traceback, once; a "
            "broken connection is never taken for the cause. A rank that was killed is named "
            "with its signal."
        ),
        fix=(
            "Look at the traceback of the rank that is named. Killed by SIGKILL means, most "
            "often, that the machine was out of memory: smaller batches, fewer loader workers. "
            "Under torchrun on several machines only the ranks of one machine end at once; the "
            "others end by the strategy's `timeout`."
        ),
        component="minitrainer.launch.report.first_cause",
        test="tests/launch/test_failures.py::test_the_traceback_of_the_rank_that_raised",
        plain="tests/pitfalls/test_launch.py::test_plain_peers_of_a_failed_rank_are_not_told_why",
        rows=("C8",),
        unproven="The messages of NCCL: on GPUs, the same test with nccl.",
    ),
    Entry(
        code="L05",
        title="What the ranks computed cannot be handed back",
        symptom="[L05] What rank 0 computed could not be handed back: ...",
        cause=(
            "`fit` with `devices` trains in processes of its own and hands weights, metrics and "
            "predictions back to the script through a temporary file."
        ),
        remedy="The value is refused by name and place before anything is written.",
        fix=(
            "Let hooks and `predict_step` return tensors, numbers, strings and containers of "
            "them; see that the temporary folder has room."
        ),
        component="minitrainer.launch.run_on_local_ranks",
        test="tests/launch/test_local.py::test_what_cannot_be_handed_back",
    ),
    Entry(
        code="L06",
        title="The port is in use",
        symptom=(
            "DistNetworkError: The server socket has failed to listen on any local network "
            "address ... EADDRINUSE; address already in use. A second job on the machine, or the "
            "same job started again too soon."
        ),
        patterns=("EADDRINUSE", "address already in use", "failed to listen on any local"),
        cause="The port of the rendezvous is a fixed number, 29500 in most guides.",
        remedy=(
            "Local ranks meet on a free port that the system chooses when it is bound, so nobody "
            "can take it in between. MASTER_PORT is used when the user sets it; then a busy one "
            "is this error."
        ),
        fix="Unset MASTER_PORT. On several machines give each job a port of its own.",
        component="minitrainer.launch.run_on_local_ranks",
        test="tests/launch/test_local.py::test_one_launch_after_another_and_two_at_once",
        plain="tests/pitfalls/test_launch.py::test_plain_fixed_port_is_in_use",
        rows=("A14", "B25", "B29"),
    ),
    Entry(
        code="L07",
        title="Two ranks are on the same GPU",
        symptom=(
            "torch.OutOfMemoryError: CUDA out of memory on GPU 0 while the others are idle; or "
            "ncclInvalidUsage ... Duplicate GPU detected : rank 1 and rank 0 both on CUDA "
            "device."
        ),
        patterns=("Duplicate GPU detected", "out of memory"),
        cause=(
            "The device was chosen by hand, as 0 on every rank; or CUDA_VISIBLE_DEVICES differs "
            "between ranks, and its entries overlap."
        ),
        remedy=(
            "Before training, host and UUID of each rank's GPU (or part of one) are compared, "
            "and two ranks on the same one are both named."
        ),
        fix="Let the launcher choose the devices: no --local_rank by hand, no own set_device.",
        component="minitrainer.launch.device.check_identities",
        test="tests/launch/test_device.py::test_two_ranks_on_one_gpu_are_named",
        rows=("A8",),
        unproven=(
            "That UUIDs of real GPUs differ as they should: on 2 GPUs, both ranks started with "
            "CUDA_VISIBLE_DEVICES=0."
        ),
    ),
    Entry(
        code="L20",
        title="A --local_rank argument: refused, or 0 on every rank",
        symptom=(
            "error: unrecognized arguments: --local-rank=1. Or, under torchrun, all ranks "
            "compute on GPU 0, which runs out of memory."
        ),
        patterns=("unrecognized arguments:.*--local[-_]rank",),
        cause=(
            "torch.distributed.launch appends --local-rank=N, with a dash since torch 2.0; "
            "torchrun appends nothing and sets LOCAL_RANK. A parser that declares --local_rank "
            "with default 0 fails under the one and yields 0 everywhere under the other."
        ),
        remedy=(
            "The command line takes both spellings and ignores them: LOCAL_RANK of the "
            "environment is what counts, and there is no setting for it. `doctor --script "
            "train.py` names the line in a script that declares it."
        ),
        fix="In a script of your own, read LOCAL_RANK, or better nothing: the trainer does.",
        component="minitrainer.launch.environment.strip_local_rank",
        test="tests/test_processes.py::test_launchers_of_torch",
        plain="tests/pitfalls/test_launch.py::test_a_script_that_declares_local_rank",
        rows=("A7", "A8", "A9", "B6"),
    ),
    Entry(
        code="L21",
        title="Model, batch and wrapper are on different devices",
        symptom=(
            "RuntimeError: Expected all tensors to be on the same device, but found at least two "
            "devices, cuda:0 and cuda:1!"
        ),
        patterns=(
            "Expected all tensors to be on the same device",
            "device_ids and output_device arguments only work with",
        ),
        cause=(
            "The device is chosen in several places of a script that must agree: set_device, "
            ".cuda(), device_ids and output_device."
        ),
        remedy=(
            "The device of a rank is its LOCAL_RANK, chosen in one place; the module and each "
            "batch are moved there, and the wrapper gets the same number (none on the CPU). A "
            "rank whose number has no GPU is an error before training."
        ),
        fix="Make new tensors on self.device in your module.",
        component="minitrainer.launch.device.pick_device",
        test="tests/launch/test_device.py::test_more_gpus_than_there_are",
        rows=("A8", "B13"),
        unproven="All of it but the errors: on 2 GPUs, nvidia-smi shows one process on each.",
    ),
    Entry(
        code="L22",
        title="Every rank holds memory on GPU 0",
        symptom=(
            "nvidia-smi lists all ranks on GPU 0, a few hundred MB each, besides the GPU of "
            "their own; GPU 0 runs out of memory first."
        ),
        cause=(
            "Something touched CUDA before set_device: init_process_group, a tensor on 'cuda', a "
            "checkpoint loaded without map_location."
        ),
        remedy=(
            "The order is fixed: device, then process group (which is told the device), then "
            "data, weights, wrapper. Counting the GPUs does not start CUDA."
        ),
        component="minitrainer.launch.device.pick_device",
        test="tests/launch/test_device.py::test_counting_devices_does_not_start_cuda",
        rows=("A10", "B5"),
        unproven=(
            "Contexts exist on GPUs only. On 2 GPUs, compare the processes of nvidia-smi with "
            "init_process_group before and after set_device."
        ),
    ),
    Entry(
        code="L23",
        title="The process group is left open",
        symptom=(
            "ValueError: trying to initialize the default process group twice! Or, at the end, "
            "terminate called without an active exception and exit code -6 in place of the real "
            "one; NCCL warns that destroy_process_group() was not called before program exit."
        ),
        patterns=(
            "initialize the default process group twice",
            "terminate called without an active exception",
            r"destroy_process_group\(\) was not called",
        ),
        cause="destroy_process_group was left out, or an exception went past it.",
        remedy=(
            "The group is held by a context: on gloo it is destroyed whatever happens; on NCCL, "
            "after an exception, it is not, because that would wait for ranks that never come."
        ),
        component="minitrainer.dist.process_group",
        test="tests/pitfalls/test_launch.py::test_a_process_group_left_open_by_an_exception",
        plain="tests/pitfalls/test_launch.py::test_a_process_group_left_open_by_an_exception",
        rows=("B5",),
        unproven="The way out after an exception on NCCL.",
    ),
    Entry(
        code="L24",
        title="Ranks live on when their launcher is gone",
        symptom=(
            "nvidia-smi shows memory in use, ps shows python processes, although the job was "
            "killed; the next job finds no memory or no port."
        ),
        cause=(
            "A killed launcher cannot tell its ranks. Sessions of their own, and loader workers "
            "of ranks, are reached by no Ctrl-C."
        ),
        remedy=(
            "The kernel ends local ranks together with their launcher (Linux); Ctrl-C and "
            "SIGTERM are passed on, and what does not end is killed."
        ),
        fix="Under torchrun it is torchrun that starts the ranks: end it by SIGTERM, not SIGKILL.",
        component="minitrainer.launch.fork.die_with",
        test="tests/launch/test_stopping.py::test_the_launcher_is_killed",
        plain="tests/pitfalls/test_launch.py::test_plain_ranks_outlive_their_launcher",
    ),
    Entry(
        code="L25",
        title="A preempted job loses what it did since the last save",
        symptom="The scheduler sends SIGTERM, the job ends in the middle of a step with code -15.",
        cause="Python's answer to SIGTERM is to end at once; a handler on one rank stops one rank.",
        remedy=(
            "SIGTERM and the first Ctrl-C are noted, agreed upon with the next gradients, and "
            "all ranks leave the loop at the same step; `ModelCheckpoint` saves it. The exit "
            "code is 143 or 130."
        ),
        fix="Give the scheduler's grace period room for one step and one save.",
        component="minitrainer.launch.signals.StopSignals",
        test="tests/test_processes.py::test_ctrl_c_finishes_the_step_saves_and_leaves",
        plain="tests/pitfalls/test_launch.py::test_plain_loop_is_ended_in_its_middle_by_sigterm",
    ),
    Entry(
        code="L26",
        title="The launch command breaks at a line's end, or names an old launcher",
        symptom=(
            "bash: line 2: --nproc_per_node=4: command not found. Or FutureWarning: The module "
            "torch.distributed.launch is deprecated and will be removed in future."
        ),
        patterns=(
            r"--(nproc|nnodes|node|master|rdzv)[\w-]*(=\S+)?: command not found",
            r"torch\.distributed\.launch is deprecated",
        ),
        cause=(
            "A comment behind the backslash ends the command, and the lines that follow are "
            "commands of their own."
        ),
        remedy=(
            "`python -m minitrainer fit recipe.yaml trainer.devices=4` starts the ranks; all "
            "else stands in the recipe. It runs under torchrun and the old launcher as well."
        ),
        fix="For several machines, docs/clusters.md has the torchrun line.",
        component="minitrainer.cli.main",
        test="tests/test_cli.py::test_two_ranks_print_one_result",
        plain="tests/pitfalls/test_launch.py::test_a_comment_behind_the_backslash_ends_the_command",
        rows=("A15", "A16", "B25"),
    ),
    Entry(
        code="L27",
        title="Each rank makes a run directory of its own",
        symptom="Two directories, seconds apart; checkpoints in one, metrics in the other.",
        cause="The name holds the time, and each process makes it at another one.",
        remedy="Rank 0 makes the directory, once, and tells the others its path.",
        component="minitrainer.rundir.make_run_dir",
        test="tests/test_processes.py::test_two_runs_at_once_one_directory_each",
        plain="tests/pitfalls/test_launch.py::test_plain_time_stamps_differ_between_ranks",
    ),
    Entry(
        code="L28",
        title="A backend that the device does not have",
        symptom="ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        patterns=("ProcessGroupNCCL is only supported with GPUs", "No backend type associated"),
        cause="The backend is written into the script, as nccl; on a CPU gloo is the only choice.",
        remedy="nccl on CUDA, gloo on the CPU, with the device and the timeout given explicitly.",
        component="minitrainer.dist.process_group",
        test="tests/pitfalls/test_launch.py::test_plain_nccl_on_a_machine_without_gpus",
        plain="tests/pitfalls/test_launch.py::test_plain_nccl_on_a_machine_without_gpus",
        rows=("A11", "B7"),
        unproven="That nccl is chosen on GPUs: on a GPU, dist.get_backend() within a fit.",
    ),
)
