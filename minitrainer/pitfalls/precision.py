"""Precision: mixed precision by hand."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="P01",
        title="A precision that is unknown or cannot be used",
        symptom="[P01] precision='fp8' is unknown.",
        cause=(
            "The name is misspelt; or the numbers of the loss scale cannot work: one that does "
            "not shrink after an overflow skips steps for ever."
        ),
        remedy="Checked when the trainer is made.",
        fix="Use fp32, bf16 or fp16.",
        component="minitrainer.plugins.amp.AMPPlugin",
        test=(
            "tests/training/test_amp.py::"
            "test_refuses_unknown_precision_and_a_scale_that_never_shrinks"
        ),
    ),
    Entry(
        code="P20",
        title="The scaler skipped the step, but scheduler and counters went on",
        symptom=(
            "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. Or "
            "nothing, and the learning rate is ahead of the steps taken."
        ),
        patterns=(r"lr_scheduler\.step\(\)` before `optimizer\.step\(\)",),
        cause="GradScaler.step returns None whether it has stepped or not.",
        remedy=(
            "Whether the step was taken is part of the step's result; scheduler, global_step and "
            "log follow the steps really taken, on all ranks alike, since the gradients are "
            "reduced before they are looked at. Skipped steps are counted in the checkpoint's "
            "counters."
        ),
        component="minitrainer.plugins.amp.AMPPlugin",
        test="tests/training/test_amp.py::test_a_skipped_step_is_no_step",
        plain="tests/training/test_amp.py::test_plain_gradscaler_falls_in",
        rows=("B18",),
    ),
    Entry(
        code="P21",
        title="Gradients are clipped while they are scaled",
        symptom=(
            "Training with fp16 hardly moves; the gradient norm in the log is in the thousands."
        ),
        cause="clip_grad_norm_ comes before unscale_, or without it.",
        remedy="Once per window: unscale, then weight, clip and log the norm, then step or skip.",
        component="minitrainer.plugins.amp.AMPPlugin",
        test="tests/training/test_amp.py::test_clipping_sees_true_gradients_in_fp16",
        plain="tests/pitfalls/test_precision.py::test_plain_clipping_of_scaled_gradients",
        rows=("B18",),
    ),
    Entry(
        code="P22",
        title="The scaler is not in the checkpoint",
        symptom="After each resume the first steps are skipped.",
        cause="Scale and growth tracker are state; a new scaler starts at 65536.",
        remedy=(
            "They are saved and loaded. A resume with fp16 from a run without a scaler is an "
            "error that says so."
        ),
        component="minitrainer.plugins.amp.AMPPlugin",
        test="tests/training/test_amp.py::test_scaler_state_is_saved_and_goes_on",
        plain="tests/pitfalls/test_precision.py::test_plain_resume_without_the_scaler",
        rows=("B18", "B33"),
    ),
    Entry(
        code="P23",
        title="Deprecated names of mixed precision",
        symptom=(
            "FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated. Please use "
            "`torch.amp.GradScaler('cuda', args...)` instead."
        ),
        patterns=(r"torch\.cuda\.amp\.\w+(\(args\.\.\.\))?` is deprecated",),
        cause="torch.cuda.amp is the old place, and does nothing without a GPU.",
        remedy=(
            "torch.amp with the device of the run: fp16 and bf16 work on CPU and CUDA alike, "
            "with a scaler for fp16 only."
        ),
        fix="Take autocast and scalers out of your module; set `precision`.",
        component="minitrainer.plugins.amp.AMPPlugin",
        test="tests/training/test_amp.py::test_forward_runs_in_the_lower_precision",
        plain="tests/pitfalls/test_precision.py::test_plain_old_names_are_deprecated",
        rows=("B15",),
    ),
)
