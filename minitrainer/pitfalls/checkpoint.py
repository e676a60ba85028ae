"""Checkpoint: files that are whole, complete and fit."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="C01",
        title="There is no checkpoint at the path",
        symptom="[C01] runs/a/last.ckpt does not exist.",
        cause="A typing error, or another working directory on another rank or machine.",
        remedy="Looked at before ranks are started; the message names what is there instead.",
        fix="Correct the path; on several machines it must be visible to all.",
        component="minitrainer.storage.read_checkpoint",
        test="tests/test_storage.py::test_a_missing_file_is_named_with_its_nearest_neighbour",
    ),
    Entry(
        code="C02",
        title="The file is broken, or would run code",
        symptom=(
            "_pickle.UnpicklingError: Weights only load failed. ... Unsupported global; or "
            "PytorchStreamReader failed reading zip archive; or invalid load key."
        ),
        patterns=(
            "Weights only load failed",
            "PytorchStreamReader failed",
            "invalid load key",
            "pickle data was truncated",
        ),
        cause=(
            "A pickle can run anything when it is loaded; weights_only=False allows that. Or the "
            "file is cut, or no checkpoint at all."
        ),
        remedy=(
            "Files are read with weights_only=True, always, and their checksums are verified. A "
            "file that would run code is refused by the name of what it asks for."
        ),
        fix="Fetch it again, or take an older one. Save weights from elsewhere as tensors only.",
        component="minitrainer.storage.read_checkpoint",
        test="tests/test_storage.py::test_a_file_that_would_run_code_is_named_and_runs_nothing",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_load_runs_code",
        rows=("B34",),
    ),
    Entry(
        code="C03",
        title="The weights do not fit, or are silently not loaded",
        symptom=(
            "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict "
            "... Unexpected key(s) ... size mismatch for. Or, with strict=False, no message and "
            "random weights."
        ),
        patterns=(
            r"Error\(s\) in loading state_dict",
            r"Missing key\(s\) in state_dict",
            r"Unexpected key\(s\) in state_dict",
            "size mismatch for",
            "loaded state dict contains a parameter group that doesn't match",
        ),
        cause="Another module, other sizes, or names with the prefix of a wrapper.",
        remedy=(
            "Strict by default; numbers and first names of what matched, is missing or "
            "unexpected. Shapes that differ, or no name that fits, are errors even with "
            "strict=False. Another seed, optimizer or number of schedulers is refused by a "
            "resume too."
        ),
        fix="Build the module with the arguments it was saved with.",
        component="minitrainer.weights.load_weights",
        test="tests/test_weights.py::test_no_name_that_fits_always_raises_and_changes_nothing",
        plain="tests/test_weights.py::test_plain_torch_falls_in",
        rows=("A4",),
    ),
    Entry(
        code="C04",
        title="The checkpoint cannot be written",
        symptom=(
            "OSError: No space left on device; RuntimeError: basic_ios::clear: iostream error; "
            "PytorchStreamWriter failed writing file. On the other ranks: a closed connection."
        ),
        patterns=("No space left on device", "iostream error", "PytorchStreamWriter failed"),
        cause="The disk is full, or files of every epoch are kept; only rank 0 writes.",
        remedy=(
            "One error on all ranks, which names the path and the reason; the file before it is "
            "untouched. `ModelCheckpoint` keeps the newest or the best few."
        ),
        fix="Make room, or keep fewer (ModelCheckpoint(save_top_k=...)).",
        component="minitrainer.storage.write_file",
        test="tests/training/test_resume.py::test_a_failed_save_is_one_error_on_all_ranks",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_save_fails_on_rank_0_only",
        rows=("B24",),
    ),
    Entry(
        code="C05",
        title="A checkpoint that torch refuses to load again",
        symptom=(
            "UnpicklingError: Weights only load failed ... Unsupported global: GLOBAL "
            "numpy.core.multiarray.scalar was not an allowed global by default."
        ),
        patterns=("Unsupported global", "not an allowed global by default"),
        cause=(
            "Paths, numpy numbers and arrays, configuration objects in hyperparameters or "
            "callback states: torch.save takes them, torch.load refuses them since 2.6."
        ),
        remedy=(
            "Everything is made plain when it is saved (a Path becomes a string, a numpy number "
            "a number); what has no plain form is refused there, by its place in the checkpoint."
        ),
        fix="Keep tensors, numbers, strings and containers of them in state_dict() and hparams.",
        component="minitrainer.plain.plain",
        test="tests/test_storage.py::test_any_config_can_be_written_and_loads_with_weights_only",
        plain="tests/test_storage.py::test_plain_torch_falls_in",
    ),
    Entry(
        code="C20",
        title="A kill while saving destroys the last good checkpoint",
        symptom=(
            "last.ckpt is cut or empty: EOFError: Ran out of input; PytorchStreamReader failed "
            "reading zip archive: failed finding central directory."
        ),
        patterns=(r"\bEOFError\b", "failed finding central directory"),
        cause="torch.save opens the file for writing, which empties it first.",
        remedy=(
            "A temporary file beside it, flushed to the disk, then renamed: the file is whole or "
            "the old one. A stray temporary file is removed by the next save."
        ),
        component="minitrainer.plugins.checkpoint_io.CheckpointIO",
        test="tests/test_storage.py::test_a_kill_leaves_the_old_file_and_the_next_write_cleans_up",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_save_killed_half_way_leaves_nothing",
        rows=("A17", "B24"),
    ),
    Entry(
        code="C21",
        title="Names in the checkpoint carry the prefix of a wrapper",
        symptom=(
            'Missing key(s) in state_dict: "layer.weight". Unexpected key(s) in state_dict: '
            '"module.layer.weight".'
        ),
        patterns=(r'"(module|_orig_mod)\.', r'key\(s\) in state_dict: "(module|_orig_mod)'),
        cause="The state_dict of the wrapper, DDP or torch.compile, was saved.",
        remedy=(
            "Checkpoints hold the names of the plain module. Reading takes either: prefixes that "
            "all names have are stripped, or added for a wrapped module."
        ),
        component="minitrainer.weights.load_weights",
        test="tests/training/test_resume.py::test_keys_are_those_of_the_plain_module",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_names_carry_module",
        rows=("A4", "B24", "B34"),
    ),
    Entry(
        code="C22",
        title="A resume that has weights only",
        symptom="After a resume the loss jumps, the learning rate starts anew, dropout repeats.",
        cause="Optimizer, schedulers, scaler, counters and random states were not saved.",
        remedy=(
            "A checkpoint holds all of them, the random state of each rank, the place in the "
            "data and the states of callbacks; every rank loads it. On the same layout a resumed "
            "run ends with the same weights, bit by bit. A file without them is refused by a "
            "resume."
        ),
        component="minitrainer.snapshot.capture",
        test="tests/training/test_resume.py::test_random_numbers_and_momentum_go_on",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_resume_from_weights_alone",
        rows=("A4", "B33"),
    ),
    Entry(
        code="C23",
        title="Every rank loads the checkpoint onto GPU 0",
        symptom="torch.OutOfMemoryError on GPU 0 at the start of a resume, on no other GPU.",
        cause="torch.load without map_location puts tensors back on the device they came from.",
        remedy="Files are read onto the CPU; the module and the optimizer take them from there.",
        component="minitrainer.storage.read_checkpoint",
        test="tests/plugins/test_checkpoint_io.py::test_a_checkpoint_comes_back_and_goes",
        rows=("B34",),
        unproven=(
            "There is no other device than the CPU. On 2 GPUs, resume and compare the memory of "
            "GPU 0 with that of GPU 1."
        ),
    ),
    Entry(
        code="C24",
        title="A resume within a shuffled epoch sees samples twice, and others never",
        symptom="No message: batches are skipped, but of another permutation.",
        cause="The sampler of the new process draws another order than the one that was cut off.",
        remedy=(
            "The order follows from seed and epoch, and the cursor counts samples over all "
            "ranks: a resume goes on behind it, without reading what was seen where a sampler "
            "tells the order, and on any number of ranks."
        ),
        component="minitrainer.data.TrainingData",
        test="tests/training/test_resume.py::test_shuffled_epoch_is_seen_once_over_a_resume",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_resume_within_a_shuffled_epoch",
    ),
    Entry(
        code="C25",
        title="A save within an accumulation window loses its gradients",
        symptom="A resumed run ends with other weights than the whole run; no message.",
        cause="Gradients of the micro-batches before the save are in no checkpoint.",
        remedy="Asked for within a window, the save takes place at its end, on all ranks.",
        component="minitrainer.session.Session",
        test="tests/training/test_resume.py::test_a_save_inside_a_window_takes_place_at_its_end",
        plain=(
            "tests/pitfalls/test_checkpoint.py::test_plain_save_within_a_window_loses_its_gradients"
        ),
    ),
    Entry(
        code="C26",
        title="Every rank writes the same file",
        symptom="Checkpoints that are broken now and then, or slow to write; no message.",
        cause="torch.save stands in the loop without a condition on the rank.",
        remedy="trainer.save_checkpoint is called on all ranks, and rank 0 alone touches the disk.",
        component="minitrainer.session.Session",
        test=(
            "tests/pitfalls/test_checkpoint.py::"
            "test_a_save_without_a_condition_is_done_by_every_rank"
        ),
        plain=(
            "tests/pitfalls/test_checkpoint.py::"
            "test_a_save_without_a_condition_is_done_by_every_rank"
        ),
        rows=("B24",),
    ),
    Entry(
        code="C27",
        title="The newest checkpoint is broken, and the run goes on from an older one",
        symptom="[C27] runs/a/checkpoints/last.ckpt is skipped: ... cannot be read as a checkpoint",
        cause="The file was cut or damaged after it had been written: a full disk, a bad copy.",
        remedy=(
            "--resume auto reads each checkpoint of the run through before it takes it, the newest "
            "first, and says which ones it skips; rank 0 decides for all. One asked for by "
            "its path, or as last or best, is an error instead."
        ),
        component="minitrainer.resume.find",
        test="tests/training/test_choosing.py::test_auto_skips_broken_ones_loudly",
    ),
    Entry(
        code="C28",
        title="A run goes on with another global batch",
        symptom="After a resume on other GPUs the loss is worse, or the schedule ends too early.",
        cause=(
            "Batch size, accumulation or the number of ranks changed: the optimizer takes more or "
            "fewer steps of another size, with the same learning rate."
        ),
        remedy=(
            "The remaining samples of the epoch are exactly those not yet seen, on any layout; the "
            "change is said."
        ),
        fix="Keep batch size x accumulate x ranks, or use a LearningRateRule.",
        component="minitrainer.snapshot.restore",
        test="tests/training/test_choosing.py::test_another_global_batch_and_another_length_are_said",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_resume_with_another_global_batch_takes_other_steps",
    ),
    Entry(
        code="C29",
        title="A run goes on with a dataset of another length",
        symptom="No message: some samples of the epoch are seen twice, some not at all.",
        cause="The order of an epoch is drawn for a length; the cursor stands in another order.",
        remedy="It is said. From the next epoch on every sample is seen once again.",
        fix="Resume with the same data, or from a checkpoint made at the end of an epoch.",
        component="minitrainer.snapshot.restore",
        test="tests/training/test_choosing.py::test_another_global_batch_and_another_length_are_said",
        plain="tests/pitfalls/test_checkpoint.py::test_plain_resume_with_more_samples_sees_some_twice",
    ),
)
