"""Training: windows, weights, clipping, metrics, and what a module returns."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="T01",
        title="configure_optimizers returned something that cannot be used",
        symptom="[T01] configure_optimizers returned None.",
        cause=(
            "No optimizer, one of parameters that are not the module's, a scheduler of another "
            "optimizer, or a ReduceLROnPlateau that does not know its metric."
        ),
        remedy="Checked before the first step.",
        fix=(
            "Return an optimizer, (optimizer, scheduler), or the dictionary that the message shows."
        ),
        component="minitrainer.optimization.configure",
        test="tests/training/test_schedulers.py::test_refuses_what_is_no_optimizer",
    ),
    Entry(
        code="T02",
        title="training_step returned something that is not a loss",
        symptom="[T02] training_step returned Tensor of shape (4,).",
        cause=(
            "A loss for each sample in place of their mean, a number without a graph, no key loss."
        ),
        remedy="An error that says what it got, in place of one in backward.",
        fix=(
            "Return a scalar tensor, {'loss': tensor, 'weight': number}, or None to skip the batch."
        ),
        component="minitrainer.step.weigh",
        test="tests/pitfalls/test_training.py::test_what_is_no_loss_is_refused",
    ),
    Entry(
        code="T03",
        title="A metric is monitored that nobody logs",
        symptom=(
            "[T03] ModelCheckpoint monitors 'val_acc', which nobody had logged by the end of "
            "epoch 0. Did you mean ...?"
        ),
        cause="A misspelt name, or a metric of a validation that has not run.",
        remedy=(
            "A warning while no validation has run, an error once one has, with the names that "
            "are there."
        ),
        fix="Log it, or monitor another metric.",
        component="minitrainer.monitor.Monitor",
        test="tests/test_monitor.py::test_a_missing_metric_is_an_error_once_a_validation_has_run",
    ),
    Entry(
        code="T04",
        title="self.log has no meaning there, or not with this value",
        symptom="[T04] self.log('acc') got a tensor of shape (2,).",
        cause="A metric is one number, logged within a step of a run.",
        remedy="An error at the call, with the name of the metric.",
        fix="Log its mean, or each part under a name of its own.",
        component="minitrainer.metrics.MetricStore",
        test="tests/training/test_metrics.py::test_what_cannot_be_logged_is_said",
    ),
    Entry(
        code="T05",
        title="The model does not fit on one device",
        symptom=(
            "torch.OutOfMemoryError: CUDA out of memory while the model is moved or the "
            "optimizer takes its first step, on any number of GPUs."
        ),
        patterns=("out of memory", r"\bOutOfMemoryError\b"),
        cause=(
            "DDP holds the whole model, its gradients and the optimizer's state on every rank; "
            "it splits the batch and nothing else."
        ),
        remedy=(
            "What is always there is worked out from shapes, shown by the ledger, and compared "
            "with the memory of the device before anything is moved."
        ),
        fix=(
            "A smaller model or optimizer, or a trainer that splits the model (FSDP). "
            "Activations are not part of the estimate: smaller batches help there."
        ),
        component="minitrainer.memory.check_fits",
        test="tests/test_memory.py::test_a_model_that_does_not_fit_is_an_error_before_training",
        rows=("A1", "A2", "B4"),
        unproven="torch running out of a GPU's memory: on one, the same model with plain DDP.",
    ),
    Entry(
        code="T06",
        title="An optimizer is stepped by hand where that does not work",
        symptom=(
            "[T06] self.manual_backward was called, but training_step does not step the optimizers."
        ),
        cause=(
            "backward or step is called outside of training_step, past what self.optimizers() "
            "returns, or in a module whose optimizer the trainer steps."
        ),
        remedy=(
            "With automatic_optimization = False the optimizers step in training_step, and each "
            "step reduces the gradients of its own parameters; anywhere else it is this error."
        ),
        fix="Set automatic_optimization = False in the class, or leave the steps to the trainer.",
        component="minitrainer.plugins.manual.ManualOptimizer",
        test=(
            "tests/training/test_manual.py::"
            "test_optimizers_are_stepped_in_training_step_and_by_what_optimizers_returns"
        ),
    ),
    Entry(
        code="T20",
        title="Every rank prints",
        symptom="Each line of the log as often as there are ranks, and bars that tear each other.",
        cause="Every rank runs the whole script.",
        remedy=(
            "The library's own lines, the bar and the result come from rank 0; warnings of other "
            "ranks carry their rank, and one that several ranks give is shown once. Where there "
            "is no terminal the bar is a few plain lines."
        ),
        fix="Use logging, or `if self.global_rank == 0` around print, in your own code.",
        component="minitrainer.logs.rank_logging",
        test="tests/test_processes.py::test_output_into_a_file",
        plain="tests/pitfalls/test_training.py::test_plain_output_comes_from_every_rank",
        rows=("A3", "A13"),
    ),
    Entry(
        code="T21",
        title="The last window of an epoch is lost, divided wrongly or leaked",
        symptom="No message: with 6 batches and windows of 4, batches 5 and 6 are not trained.",
        cause=(
            "A counter with % N steps after every N-th batch only; what is left is dropped, or "
            "added to the first window of the next epoch, and divided by N either way. Stepping "
            "in two places, once past the scaler, is of the same family."
        ),
        remedy=(
            "The epoch is cut into windows beforehand. The last one may be shorter and is "
            "divided by its own weight; nothing goes over the border. The optimizer steps in one "
            "place."
        ),
        component="minitrainer.plugins.accumulate.Accumulator",
        test="tests/training/test_accumulation.py::test_nothing_leaks_over_the_epoch_border",
        plain=(
            "tests/pitfalls/test_training.py::test_plain_counter_drops_the_last_window_and_leaks_it"
        ),
        rows=("B21",),
    ),
    Entry(
        code="T22",
        title="The mean of means is not the mean over tokens",
        symptom="Results change with accumulation, ranks or padding; no message.",
        cause="Micro-batches with few valid tokens (or samples) count as much as full ones.",
        remedy=(
            "The gradient is sum(weight * gradient) / sum(weight) over window and ranks; the "
            "weight is the number of samples, or what training_step returns as weight."
        ),
        fix="Where losses are means over tokens, return {'loss': loss, 'weight': tokens}.",
        component="minitrainer.step.weigh",
        test="tests/training/test_accumulation.py::test_mean_over_tokens_is_the_same_split_or_not",
        plain=(
            "tests/pitfalls/test_training.py::test_plain_mean_of_means_is_not_the_mean_over_tokens"
        ),
    ),
    Entry(
        code="T23",
        title="Gradients are clipped in every micro-batch",
        symptom="Clipping has another effect with accumulation than without; no message.",
        cause="What is clipped is a part of the gradient, or a part plus what was clipped before.",
        remedy="Once per window, on the whole gradient; the norm in the log is the one before.",
        component="minitrainer.trainer.Trainer",
        test=(
            "tests/training/test_accumulation.py::"
            "test_clipping_takes_place_once_per_window_and_the_norm_is_logged"
        ),
        plain="tests/pitfalls/test_training.py::test_plain_clipping_in_each_micro_batch",
    ),
    Entry(
        code="T24",
        title="The scheduler runs ahead of the steps",
        symptom="The learning rate is at its end long before training is; no message.",
        cause="It steps with each micro-batch, or as often as there are ranks.",
        remedy=(
            "Schedulers count optimizer steps really taken, or epochs; the total is known before."
        ),
        component="minitrainer.optimization.Optimization",
        test="tests/training/test_accumulation.py::test_scheduler_counts_optimizer_steps",
        plain="tests/pitfalls/test_training.py::test_plain_scheduler_steps_with_each_micro_batch",
    ),
    Entry(
        code="T25",
        title="Memory grows with every step",
        symptom=(
            "torch.OutOfMemoryError: CUDA out of memory after some hundred steps. The advice: "
            "torch.cuda.empty_cache()."
        ),
        patterns=("out of memory", r"\bOutOfMemoryError\b", "empty_cache"),
        cause=(
            "`total += loss` keeps the graph of every step alive. empty_cache gives back only "
            "what nobody uses any more, and slows each step down."
        ),
        remedy=(
            "What is logged is detached and copied at the door, and folded into a sum every few "
            "steps, so neither graphs nor tensors pile up."
        ),
        fix=(
            "Use self.log; in your own sums write loss.detach(). Take empty_cache out of the "
            "loop. Memory that is short from the first step on is another matter: DDP copies the "
            "model to every rank and splits the batch only."
        ),
        component="minitrainer.metrics.MetricStore",
        test="tests/training/test_metrics.py::test_no_graph_and_no_tensor_is_kept",
        plain="tests/pitfalls/test_training.py::test_plain_sum_of_losses_keeps_every_graph",
        rows=("B31",),
        unproven=(
            "The memory of a GPU: on one, torch.cuda.memory_allocated() after 50 and 200 steps."
        ),
    ),
    Entry(
        code="T26",
        title="The mean of an epoch counts a short last batch in full",
        symptom="The same weights give other metrics with another batch size; no message.",
        cause="The mean is taken over batches.",
        remedy="Logged means are weighted by samples, over batches and ranks, in float64.",
        fix="Where a metric counts something else, give log its batch_size.",
        component="minitrainer.metrics.MetricStore",
        test="tests/training/test_metrics.py::test_epoch_mean_weighs_the_smaller_last_batch",
        plain="tests/pitfalls/test_training.py::test_plain_mean_of_batch_means",
    ),
    Entry(
        code="T27",
        title="A model is evaluated in train mode, or trained in eval mode",
        symptom="Validation is noisy and worse; or frozen batch norm is no longer frozen.",
        cause="eval() or train() is forgotten; train() also reaches layers kept in eval mode.",
        remedy=(
            "Evaluations run in eval mode without gradients; afterwards each layer has the mode "
            "it had before."
        ),
        component="minitrainer.evaluation.evaluate",
        test="tests/pitfalls/test_training.py::test_modes_are_those_of_the_stage",
        plain="tests/pitfalls/test_training.py::test_modes_are_those_of_the_stage",
        rows=("A4",),
    ),
    Entry(
        code="T28",
        title="A metric has the name of a column",
        symptom="[T28] A metric called 'step' is not written: the column is global_step.",
        cause="Each row of metrics.csv starts with the number of optimizer steps, named step.",
        remedy="The column keeps its meaning; a warning tells once of the metric.",
        fix="Give the metric another name.",
        component="minitrainer.loggers.csv.CSVLogger",
        test="tests/loggers/test_csv.py::test_a_metric_called_step_is_told_of",
    ),
    Entry(
        code="T29",
        title="There is a validation loader, but nothing to do with it",
        symptom="[T29] There is a validation loader, but Net has no validation_step.",
        cause="The method is missing or misspelt.",
        remedy="A warning before the first step; training goes on without validation.",
        fix="Write validation_step, or leave the loader out.",
        component="minitrainer.evaluation.Stage",
        test="tests/pitfalls/test_training.py::test_a_loader_without_a_step_is_told_of",
    ),
    Entry(
        code="T31",
        title="The loss is a sum and not a mean",
        symptom="The gradient shrinks with the number of ranks; no message.",
        cause="DDP averages over ranks, which is right for means: a sum is divided by the ranks.",
        remedy="`parity` names it: all gradients are smaller by the number of parts.",
        fix='Return a mean (reduction="mean"); the trainer weights it by its samples.',
        component="minitrainer.parity.compare_layouts",
        test="tests/parity/test_planted_faults.py::test_a_fault_in_the_module_is_named",
        plain="tests/pitfalls/test_training.py::test_plain_ddp_divides_what_is_no_mean",
    ),
    Entry(
        code="T32",
        title="The step draws random numbers, so layouts part by chance",
        symptom="Two layouts, or two seeds, end with other weights, and nothing is wrong.",
        cause="Dropout and noise in training_step are drawn by each rank for its own samples.",
        remedy=(
            "`parity` names the layers, and takes dropout out to compare the rest; the same run "
            "on the same layout repeats exactly."
        ),
        fix="Nothing, or switch it off where layouts are compared.",
        component="minitrainer.parity.compare_layouts",
        test="tests/parity/test_planted_faults.py::test_a_fault_in_the_module_is_named",
        plain="tests/pitfalls/test_training.py::test_plain_dropout_follows_the_layout",
    ),
    Entry(
        code="T33",
        title="The step looks at the rank or at the number of ranks",
        symptom="loss / world_size in training_step: the gradient is divided twice; no message.",
        cause="DDP averages over ranks by itself.",
        remedy=(
            "`parity` names it: gradients are the right ones times a factor, or part only on ranks."
        ),
        fix="Return the mean loss of the batch; leave rank and world_size to the trainer.",
        component="minitrainer.parity.compare_layouts",
        test="tests/parity/test_planted_faults.py::test_a_fault_in_the_module_is_named",
        plain="tests/pitfalls/test_training.py::test_plain_ddp_divides_what_is_no_mean",
    ),
    Entry(
        code="T34",
        title="A metric is that of rank 0 alone",
        symptom="The logged loss is that of a part of the data; a callback decides by it.",
        cause="Each rank computes its own value, and rank 0 prints it.",
        remedy=(
            "Logged values are means over all ranks; with sync_dist=False the column is named "
            "NAME@rank0, and `parity` tells where it parts."
        ),
        fix="Leave sync_dist=False out.",
        component="minitrainer.metrics.MetricStore",
        test="tests/training/test_metrics.py::test_reductions_over_batches_and_ranks",
        plain="tests/pitfalls/test_training.py::test_plain_value_is_that_of_its_rank",
    ),
    Entry(
        code="T35",
        title="A metric is averaged over other parts on several ranks",
        symptom="The model is the same on one rank and on two, a logged number is not.",
        cause=(
            "A running average kept in the module, or a count logged as a mean, depends on how the "
            "samples were split."
        ),
        remedy=(
            "Logged means are weighted by the number of samples over batches and ranks; `parity` "
            "names a metric that differs although the predictions agree."
        ),
        fix='Log each batch\'s own value, and counts with reduce_fx="sum".',
        component="minitrainer.parity.compare_layouts",
        test="tests/parity/test_planted_faults.py::test_a_fault_in_the_module_is_named",
        plain="tests/pitfalls/test_training.py::test_plain_value_is_that_of_its_rank",
    ),
    Entry(
        code="T36",
        title="A schedule that was planned for fewer steps than the run takes",
        symptom="ValueError: Tried to step 13 times. The specified number of total steps is 12",
        patterns=("The specified number of total steps is",),
        cause=(
            "OneCycleLR knows its number of steps; a resume with another global batch or with more "
            "epochs takes more, or it was given steps per epoch of one rank."
        ),
        remedy="It is not stepped any more, the learning rate stays, and that is said once.",
        fix="Give it trainer.total_steps, and resume with the same global batch.",
        component="minitrainer.optimization.ScheduledLR",
        test="tests/training/test_choosing.py::test_a_schedule_that_ends_before_the_run_is_said",
        plain="tests/training/test_choosing.py::test_a_schedule_that_ends_before_the_run_is_said",
    ),
)
