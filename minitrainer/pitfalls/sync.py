"""Sync: what ranks must have in common, and when they wait for each other."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="S01",
        title="The ranks built different models",
        symptom=(
            "RuntimeError: [1]: params[0] in this process with sizes [3, 2] appears not to match "
            "sizes of the same param in process 0. Rank 0 tells of a closed connection, or "
            "hangs. With another number of parameters: DDP expects same model across all ranks."
        ),
        patterns=(
            "appears not to match (sizes|strides) of the same param",
            "DDP expects same model across all ranks",
        ),
        cause="The model depends on the rank, on the data of the rank, or on unseeded randomness.",
        remedy=(
            "Names, shapes, types and requires_grad of all parameters and buffers are compared "
            "before wrapping, and every rank names the first tensor that differs."
        ),
        fix="Build the model from the same numbers on all ranks.",
        component="minitrainer.plugins.ddp.check_same_model",
        test="tests/training/test_ranks_agree.py::test_models_that_differ_are_named",
        plain="tests/pitfalls/test_sync.py::test_plain_ddp_tells_one_rank_only_that_models_differ",
    ),
    Entry(
        code="S02",
        title="A parameter got no gradient",
        symptom=(
            "RuntimeError: Expected to have finished reduction in the prior iteration before "
            "starting a new one. ... Parameter indices which did not receive grad for rank 0: 1 "
            "2"
        ),
        patterns=(
            "Expected to have finished reduction in the prior iteration",
            "did not receive grad for rank",
            "find_unused_parameters",
        ),
        cause=(
            "DDP reduces when the gradients of all parameters are there. torch notices one step "
            "later and tells numbers in place of names. With find_unused_parameters=True left on "
            "for good, each step walks through the graph."
        ),
        remedy=(
            "Off by default. After the first window, and whenever DDP complains, the error names "
            "the parameters and the setting."
        ),
        fix=(
            "Freeze them (requires_grad_(False)), use them in the loss, or give "
            "DDPStrategy(find_unused_parameters=True)."
        ),
        component="minitrainer.plugins.ddp.DDPStrategy",
        test=(
            "tests/training/test_ranks_agree.py::"
            "test_unused_parameters_are_named_and_may_be_allowed"
        ),
        plain=(
            "tests/pitfalls/test_sync.py::"
            "test_plain_ddp_names_unused_parameters_by_number_a_step_late"
        ),
        rows=("C2",),
    ),
    Entry(
        code="S03",
        title="One metric is logged in two ways",
        symptom="[S03] Metric 'loss' is logged with reduce_fx=mean ... on rank 0 and with ...",
        cause="A sum on one rank and a mean on the other have no common value.",
        remedy="The error is raised on all ranks, and names the metric and both ways.",
        fix="Use one name for one meaning.",
        component="minitrainer.metrics.MetricStore",
        test=(
            "tests/training/test_metrics.py::"
            "test_metrics_logged_differently_on_two_ranks_are_an_error_on_both"
        ),
    ),
    Entry(
        code="S04",
        title="A batch norm layer that cannot be synchronised",
        symptom="[S04] norm is a ... with a forward of its own.",
        cause=(
            "The statistics of all ranks can be taken only by layers whose computation is known: "
            "a subclass with a forward of its own computes something else."
        ),
        remedy=(
            "Refused by name before training; subclasses without a forward are kept as they are."
        ),
        fix="Use torch's layer, or leave sync_batchnorm off.",
        component="minitrainer.plugins.batchnorm.synced_batch_norm",
        test=(
            "tests/plugins/test_batchnorm.py::test_layers_that_cannot_be_synced_are_refused_by_name"
        ),
    ),
    Entry(
        code="S05",
        title="Ranks run different batch norm layers at the same time",
        symptom="[S05] ... this rank was in the forward of ... when another one was not.",
        cause="The model branches on its data, so ranks pass through layers in another order.",
        remedy="An error that names the layer, in place of statistics mixed from two.",
        fix="Let every rank run the same layers, or leave sync_batchnorm off.",
        component="minitrainer.plugins.batchnorm.StatisticsExchange",
        test=(
            "tests/plugins/test_batchnorm.py::"
            "test_ranks_at_different_layers_are_an_error_and_not_a_mixture"
        ),
    ),
    Entry(
        code="S06",
        title="Ranks step different optimizers by hand",
        symptom="[S06] Of 2 ranks 1 steps optimizer 0, 1 are through.",
        cause=(
            "With automatic_optimization = False, a rank decided by its own loss whether to "
            "step, or which optimizer."
        ),
        remedy="The ranks tell each other what they step, so they part with an error and not hang.",
        fix="Decide by batch_idx, or by a value that is equal on all ranks.",
        component="minitrainer.plugins.manual.ManualStrategy",
        test="tests/training/test_manual.py::test_ranks_that_step_differently_get_an_error",
    ),
    Entry(
        code="S20",
        title="Calling past the wrapper: gradients are not reduced",
        symptom="No message. The ranks train models of their own, and only rank 0's is saved.",
        cause="model.module(x), or a method other than forward, does not pass through DDP.",
        remedy=(
            "DDP wraps a module whose forward is the training step itself, so whatever "
            "training_step calls is inside of the wrapper."
        ),
        component="minitrainer.plugins.ddp.StepModule",
        test="tests/pitfalls/test_sync.py::test_calling_past_the_wrapper",
        plain="tests/pitfalls/test_sync.py::test_calling_past_the_wrapper",
        rows=("C1",),
    ),
    Entry(
        code="S21",
        title="Accumulation reduces gradients in every micro-batch",
        symptom="Accumulating over 4 micro-batches sends 4 times as much as needed; no message.",
        cause="no_sync is left out, or stands around backward only: DDP reads it in the forward.",
        remedy=(
            "Windows are known beforehand, so each micro-batch says whether it is the last one; "
            "the others run under no_sync, forward included. One reduction per bucket and "
            "window."
        ),
        component="minitrainer.plugins.accumulate.Accumulator",
        test=(
            "tests/training/test_accumulation.py::"
            "test_gradients_are_reduced_once_per_window_and_on_its_last_micro_batch"
        ),
        plain="tests/pitfalls/test_sync.py::test_plain_no_sync_around_backward_alone_does_nothing",
        rows=("B21",),
    ),
    Entry(
        code="S22",
        title="Two metrics are mixed, because ranks reduce them in another order",
        symptom="Values that no rank has logged; no message.",
        cause="Collectives are paired by position, whatever the tensors mean.",
        remedy=(
            "All metrics travel in one collective per flush, with their names, and are matched "
            "by name. One that a rank lacks is reduced over those that have it."
        ),
        component="minitrainer.metrics.MetricStore",
        test="tests/training/test_metrics.py::test_keys_are_matched_by_name",
        plain="tests/pitfalls/test_sync.py::test_plain_reductions_are_paired_by_position",
        rows=("C4",),
    ),
    Entry(
        code="S23",
        title="A collective on rank 0 only",
        symptom=(
            "RuntimeError: ... Timed out waiting 1800000ms for recv operation to complete. Or "
            "the run stands still, all GPUs at 100 %."
        ),
        patterns=(
            r"Timed out waiting \d+ ?ms",
            "Watchdog caught collective operation timeout",
            "Received data size doesn't match expected size",
        ),
        cause=(
            "A metric is reduced, a model evaluated or saved under `if rank == 0`: the others "
            "never join that collective, or join it with another one."
        ),
        remedy=(
            "Logging, saving and evaluation are called on all ranks, and the library decides "
            "what rank 0 alone does. log() may be called on one rank only: it communicates "
            "nothing."
        ),
        fix="Do not call torch.distributed in hooks or steps under a condition on the rank.",
        component="minitrainer.metrics.MetricStore",
        test="tests/training/test_metrics.py::test_keys_are_matched_by_name",
        plain="tests/pitfalls/test_sync.py::test_plain_collective_on_rank_0_only_hangs",
        rows=("C4",),
        unproven="NCCL's watchdog: on 2 GPUs, the same test with nccl.",
    ),
    Entry(
        code="S24",
        title="One rank leaves the loop",
        symptom=(
            "Early stopping or a signal ends one rank; the others tell: Connection closed by "
            "peer, or hang."
        ),
        patterns=("Connection (closed|reset) by peer", r"Timed out waiting \d+ ?ms"),
        cause="The decision rests on a value of one rank: a metric not reduced, a clock, a signal.",
        remedy=(
            "What one rank asks for becomes the decision of all: the wish to stop rides in the "
            "gradients, and is agreed upon again at the end of epochs and validations. Metrics "
            "that callbacks see are reduced over ranks (rank 0's value with sync_dist=False)."
        ),
        fix="In a callback set trainer.should_stop; do not raise or return on one rank.",
        component="minitrainer.plugins.ddp.DDPStrategy",
        test=(
            "tests/training/test_ranks_agree.py::"
            "test_a_stop_asked_for_on_one_rank_stops_all_at_the_same_step"
        ),
        plain="tests/pitfalls/test_sync.py::test_plain_stop_on_a_value_of_one_rank",
        rows=("C4",),
    ),
    Entry(
        code="S25",
        title="Ranks have different numbers of batches",
        symptom=(
            "The epoch never ends; or, when the rank with fewer batches is gone: Connection "
            "closed by peer."
        ),
        patterns=(
            "Connection (closed|reset) by peer",
            r"Timed out waiting \d+ ?ms",
            "exhausted all inputs|Detected at least one rank that exhausted inputs",
        ),
        cause="Each backward waits for all ranks, also for one whose loader is at its end.",
        remedy=(
            "A rank that has run dry goes on taking part with weight 0 until all are dry: every "
            "sample is trained, and all ranks end the epoch at the same step. DDP's join() is "
            "not used: any other collective within it aborts the process."
        ),
        component="minitrainer.plugins.ddp.StepModule",
        test=(
            "tests/training/test_accumulation.py::"
            "test_ranks_that_run_dry_at_different_times_train_every_item"
        ),
        plain="tests/pitfalls/test_sync.py::test_plain_ranks_with_different_numbers_of_batches",
        rows=("C7",),
    ),
    Entry(
        code="S26",
        title="A batch is skipped on one rank",
        symptom=(
            "`continue` at a NaN loss: the gradients of different batches are averaged from then "
            "on, and the last step hangs or ends with: Connection closed by peer."
        ),
        patterns=("Connection (closed|reset) by peer", r"Timed out waiting \d+ ?ms"),
        cause="The backward that was left out is paired with the next one.",
        remedy=(
            "training_step may return None: the micro-batch has weight 0, the rank still takes "
            "part in the reduction, and the mean over the others stands."
        ),
        fix="Return None from training_step where a batch is to be skipped.",
        component="minitrainer.plugins.ddp.StepModule",
        test="tests/training/test_accumulation.py::test_none_is_weight_zero_for_all_ranks",
        plain="tests/pitfalls/test_sync.py::test_plain_skipped_batch_pairs_the_wrong_gradients",
    ),
    Entry(
        code="S27",
        title="Running statistics of batch norm differ between ranks",
        symptom="Rank 0 validates another model than rank 1; the saved file is worse than the log.",
        cause=(
            "Each rank updates the buffers from its own batch. DDP overwrites them by rank 0's "
            "at the next forward that reduces, so after the last one they stay apart."
        ),
        remedy=(
            "Before each validation, before saving and at the end of a fit the buffers are made "
            "equal: rank 0's, or with DDPStrategy(buffers='mean') their mean over the ranks. No "
            "step pays for it."
        ),
        component="minitrainer.plugins.ddp.DDPStrategy",
        test=(
            "tests/training/test_ranks_agree.py::"
            "test_buffers_are_equal_before_validation_and_saving"
        ),
        plain="tests/pitfalls/test_sync.py::test_plain_ddp_leaves_batch_norm_statistics_apart",
        rows=("C5",),
    ),
    Entry(
        code="S28",
        title="Buffers are not even equal at the start",
        symptom=(
            "With broadcast_buffers=False, a buffer that the constructor made differently stays "
            "so. torch 2.14 warns that broadcast_buffers is deprecated."
        ),
        patterns=("broadcast_buffers.*deprecated",),
        cause="That argument switches the broadcast at construction off as well.",
        remedy=(
            "forward_sync_buffers=False is used in its place: parameters and buffers are those "
            "of rank 0 before the first step, and no step pays for a broadcast."
        ),
        component="minitrainer.plugins.ddp.DDPStrategy",
        test="tests/training/test_ranks_agree.py::test_buffers_are_aligned_at_the_start",
        plain=(
            "tests/pitfalls/test_sync.py::"
            "test_plain_broadcast_buffers_off_does_not_align_them_at_all"
        ),
        rows=("C5",),
    ),
    Entry(
        code="S29",
        title="A collective times out, and guides name variables that change nothing",
        symptom=(
            "Watchdog caught collective operation timeout; Timed out waiting 1800000ms. The "
            "advice: NCCL_BLOCKING_WAIT=1, NCCL_ASYNC_ERROR_HANDLING=1."
        ),
        patterns=(
            "NCCL_BLOCKING_WAIT|NCCL_ASYNC_ERROR_HANDLING",
            "Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ ?ms",
        ),
        cause=(
            "The time is that of init_process_group(timeout=). The variables are old names of "
            "TORCH_NCCL_*; the first switches the watchdog off, which would tell where it hangs, "
            "and the second is on anyway."
        ),
        remedy=(
            "DDPStrategy(timeout=seconds) is handed to the process group; 1800 by default. "
            "`doctor` tells of variables that are deprecated, misspelt, harmful or without "
            "effect here."
        ),
        fix=(
            "Unset the variables. A timeout is mostly a consequence: look for the rank that was "
            "slow, raised (L04) or had left (S24, S25)."
        ),
        component="minitrainer.plugins.ddp.DDPStrategy",
        test="tests/pitfalls/test_sync.py::test_the_timeout_is_the_one_of_the_strategy",
        plain="tests/pitfalls/test_sync.py::test_the_timeout_is_the_one_of_the_strategy",
        rows=("B22", "B30"),
        unproven=(
            "What the variables do to NCCL's watchdog: on 2 GPUs, a rank that sleeps, with and "
            "without them."
        ),
    ),
    Entry(
        code="S30",
        title="Batch norm normalises by the few rows of one rank",
        symptom="Results change with the number of ranks although the global batch is the same.",
        cause="Each rank takes mean and variance of its own part of the batch.",
        remedy=(
            "Trainer(sync_batchnorm=True): forward, gradients and running statistics are those "
            "of one process on the joined batch, with uneven and empty parts too. The layers "
            "stay the objects they are, with their hooks and names."
        ),
        fix="It joins ranks, not micro-batches: accumulation still normalises each by itself.",
        component="minitrainer.plugins.batchnorm.synced_batch_norm",
        test="tests/plugins/test_batchnorm.py::test_a_run_equals_one_process",
        plain="tests/plugins/test_batchnorm.py::test_layouts_differ_without_it",
        rows=("A5",),
    ),
    Entry(
        code="S31",
        title="torch's SyncBatchNorm refuses the CPU",
        symptom=(
            "ValueError: SyncBatchNorm expected input tensor to be on GPU or XPU. Or, from DDP: "
            "SyncBatchNorm layers only work with GPU modules."
        ),
        patterns=(
            "SyncBatchNorm expected input tensor to be on",
            "SyncBatchNorm layers only work with GPU modules",
        ),
        cause=(
            "torch computes it on accelerators only, so what is to run on a cluster cannot be "
            "tried on a laptop. It also hangs when one rank skips a batch."
        ),
        remedy=(
            "The layers exchange their sums by themselves, on gloo and nccl alike, also those "
            "that are torch's SyncBatchNorm; in one process they are plain ones."
        ),
        component="minitrainer.plugins.batchnorm.synced_batch_norm",
        test="tests/plugins/test_batchnorm.py::test_running_mean_is_that_of_the_joined_batch",
        plain="tests/plugins/test_batchnorm.py::test_torch_has_no_synced_batch_norm_on_the_cpu",
        rows=("A5",),
    ),
    Entry(
        code="S32",
        title="Two losses, two backwards, one forward",
        symptom=(
            "RuntimeError: Expected to mark a variable ready only once. Or: Trying to backward "
            "through the graph a second time. A GAN, or several optimizers, under DDP."
        ),
        patterns=(
            "Expected to mark a variable ready only once",
            "backward through the graph a second time",
        ),
        cause="DDP's reducer expects one backward per forward, and a gradient for each parameter.",
        remedy=(
            "With automatic_optimization = False there is no reducer: the step of an optimizer "
            "reduces the gradients of its own parameters, whatever backwards came before. All "
            "steps of one training_step count as one global_step."
        ),
        fix="Set automatic_optimization = False; use self.manual_backward and self.optimizers().",
        component="minitrainer.plugins.manual.ManualStrategy",
        test="tests/training/test_manual.py::test_gan_is_the_same_on_two_ranks",
        plain="tests/training/test_manual.py::test_plain_ddp_falls_in",
    ),
)
