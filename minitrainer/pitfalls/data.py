"""Data: the order of samples, the shares of ranks, random numbers."""

from minitrainer.pitfalls.entry import Entry

ENTRIES = (
    Entry(
        code="D01",
        title="There are no samples",
        symptom=(
            "[D01] The train loader has no samples. In plain torch: a run that ends at once, or "
            "ZeroDivisionError where a mean is taken."
        ),
        cause=(
            "A wrong path or filter; or drop_last with fewer samples than one micro-batch of all "
            "ranks takes."
        ),
        remedy="The number is looked at before the first step, and the message has the numbers.",
        fix="Check path and filter; take a smaller batch, fewer ranks, or drop_last=False.",
        component="minitrainer.data.TrainingData",
        test="tests/data/test_training.py::test_an_empty_loader_is_refused",
    ),
    Entry(
        code="D02",
        title="A loader that cannot be used, or not be shared over ranks",
        symptom=(
            "[D02] The sampler ... deals out the share of one rank in 2. Or: there is no loader "
            "for the stage, a dataset was given in place of one, an iterator can be read once."
        ),
        cause=(
            "A sampler that deals out the share of its rank would be dealt out once more, and "
            "most samples would never be seen."
        ),
        remedy=(
            "The trainer shares out any sampler of the whole order. A DistributedSampler is "
            "replaced by the order that it deals out; what deals in another way is refused by "
            "name."
        ),
        fix="Give a plain DataLoader, without a sampler for ranks.",
        component="minitrainer.data.TrainingData",
        test=(
            "tests/data/test_sampling.py::"
            "test_a_sampler_that_deals_by_itself_in_another_way_is_refused"
        ),
    ),
    Entry(
        code="D03",
        title="The number of samples of a batch cannot be told",
        symptom="[D03] The number of samples of a batch of type ... cannot be told.",
        cause=(
            "Losses and metrics are weighted by samples. Where no sampler tells them, they are "
            "read off the batch: dimension 0 of its first tensor, or the length of a list."
        ),
        remedy="A batch without either is an error and not counted as one.",
        fix="Put a tensor with the samples along dimension 0 into the batch.",
        component="minitrainer.data.transfer.count_samples",
        test=(
            "tests/data/test_transfer.py::test_a_batch_that_cannot_be_counted_is_named_by_its_type"
        ),
    ),
    Entry(
        code="D20",
        title="Validation counts some samples twice, or leaves some out",
        symptom=(
            "The accuracy of the same weights changes with the number of ranks; 21 samples on 2 "
            "ranks are counted as 22, or as 20 with drop_last."
        ),
        cause="DistributedSampler makes shares equal: it repeats the first samples, or drops some.",
        remedy=(
            "An evaluation deals out the batches of one process, whole, and pads nothing: ranks "
            "may have different numbers of batches, because nothing is reduced before the end. A "
            "loader with drop_last=True is taken at its word, and the samples left out are "
            "logged."
        ),
        fix="Leave drop_last=False on loaders for evaluation.",
        component="minitrainer.data.EvaluationData",
        test="tests/training/test_metrics.py::test_validation_counts_every_sample_once",
        plain="tests/training/test_metrics.py::test_plain_distributed_sampler_falls_in",
        rows=("B8", "B9", "B12"),
    ),
    Entry(
        code="D21",
        title="The same order in every epoch",
        symptom="The loss repeats its ups and downs epoch after epoch; no message.",
        cause=(
            "DistributedSampler shuffles by its epoch, which stays 0 until set_epoch is called, "
            "and called before the iterator is made."
        ),
        remedy=(
            "The order is a function of seed and epoch. set_epoch is called on samplers, batch "
            "samplers and datasets that have it, before workers start."
        ),
        component="minitrainer.data.TrainingData",
        test="tests/data/test_sampling.py::test_set_epoch_reaches_every_sampler_before_it_draws",
        plain="tests/pitfalls/test_data.py::test_plain_order_is_the_same_in_every_epoch",
        rows=("B14",),
    ),
    Entry(
        code="D22",
        title="Persistent workers never hear of the epoch",
        symptom="A dataset with set_epoch gives the items of epoch 0 in every epoch.",
        cause="Each worker holds the copy of the dataset that it was started with.",
        remedy=(
            "Every batch that a worker is asked for carries its epoch, and the copy in the "
            "worker is told before it fetches. Where that is not possible (streams, evaluations "
            "of a dataset that has set_epoch) workers are started anew, and a line says so."
        ),
        component="minitrainer.data.loading.PlannedLoader",
        test="tests/data/test_workers.py::test_the_epoch_reaches_the_workers",
        plain="tests/pitfalls/test_data.py::test_plain_persistent_workers_never_hear_of_the_epoch",
        rows=("B14", "B20"),
    ),
    Entry(
        code="D23",
        title="Training repeats or drops samples to make shares equal",
        symptom=(
            "assert len(dataset) % world_size == 0 in a script; or 5 samples trained as 6, and "
            "as 4 with drop_last."
        ),
        patterns=(r"len\((\w+\.)*dataset\) *% *world_size",),
        cause=(
            "The shares of plain ranks must be equal, or the one with more batches waits for "
            "ever. A short last batch with the weight of a full one counts its samples too much."
        ),
        remedy=(
            "Every sample is trained once. In the last round shares may be unequal or empty: the "
            "gradient is weighted by true counts, and a rank without samples takes part with "
            "weight 0. With drop_last the last round is left out, and the ledger says how many "
            "samples."
        ),
        fix="No assertion is needed, and no padding.",
        component="minitrainer.data.TrainingData",
        test="tests/training/test_accumulation.py::test_tail_counts_each_sample_once_in_any_layout",
        plain="tests/pitfalls/test_data.py::test_plain_training_shares_are_padded_or_cut",
        rows=("B8", "B12", "B32"),
    ),
    Entry(
        code="D24",
        title="All ranks draw the same samples, or the user's sampler is gone",
        symptom=(
            "A WeightedRandomSampler gives each rank the same samples; or a framework has put a "
            "DistributedSampler in its place, and the weights have no effect."
        ),
        cause="A sampler that knows nothing of ranks draws the same under the same seed.",
        remedy=(
            "The user's own sampler is drawn once per epoch, alike on all ranks, and that one "
            "order is dealt out: each draw is trained by one rank."
        ),
        component="minitrainer.data.sampling.draw_order",
        test="tests/training/test_ranks_agree.py::test_weighted_sampler_is_kept",
        plain="tests/pitfalls/test_data.py::test_plain_ranks_draw_the_same_samples",
    ),
    Entry(
        code="D25",
        title="An iterable dataset is read whole by every rank and worker",
        symptom="An epoch of 12 items takes 48, on 2 ranks with 2 workers each; no message.",
        cause="Nobody shares an IterableDataset out; each process iterates all of it.",
        remedy=(
            "Each item is kept by one worker of one rank, and one line says that all of them "
            "read the whole stream. A dataset with shards_itself = True is left alone."
        ),
        fix="Where reading is dear, let the dataset read its own shard and say shards_itself.",
        component="minitrainer.data.streaming.Stream",
        test="tests/data/test_streams.py::test_each_item_of_a_stream_is_trained_once",
        plain="tests/pitfalls/test_data.py::test_plain_stream_is_read_whole_by_everybody",
    ),
    Entry(
        code="D26",
        title="The same augmentations on every rank",
        symptom="The crops of rank 1 are those of rank 0; no message, worse results.",
        cause="Workers are seeded from the script's seed and their number, not from the rank.",
        remedy=(
            "What is random in a sample follows from the seed, the epoch and its place in the "
            "order, for torch, numpy and random: no two samples share it, and neither workers, "
            "ranks nor a resume change it. Streams have a seed for each worker and rank."
        ),
        fix=(
            "Generators that a dataset makes for itself (numpy.random.default_rng) are its own "
            "affair: draw their seeds from torch."
        ),
        component="minitrainer.data.items.SeededItems",
        test="tests/data/test_workers.py::test_first_draws_of_rank_worker_and_epoch_are_distinct",
        plain="tests/pitfalls/test_data.py::test_plain_workers_of_all_ranks_draw_the_same",
        rows=("B19", "C3"),
    ),
    Entry(
        code="D27",
        title="The same dropout on every rank, or other initial weights",
        symptom="Noise is the same on all ranks; or the seed of a run does not repeat its weights.",
        cause=(
            "One seed for all ranks makes noise alike; a seed per rank, set before the model is "
            "built, makes initial weights differ, which DDP hides by overwriting them with rank "
            "0's."
        ),
        remedy=(
            "A recipe builds the module under the seed of the run on every rank; after that, "
            "each rank goes on with a seed of its own."
        ),
        fix="In a script of your own call minitrainer.seed_everything before you build the module.",
        component="minitrainer.data.seeding.derive_seed",
        test=(
            "tests/training/test_ranks_agree.py::"
            "test_dropout_differs_between_ranks_and_initial_weights_do_not"
        ),
        plain="tests/pitfalls/test_data.py::test_plain_seeds_are_one_or_the_other",
        rows=("C3",),
    ),
    Entry(
        code="D28",
        title="A random split is another one on each rank",
        symptom="Validation is better than it can be: other ranks have trained its samples.",
        cause="random_split draws from the generator of its process.",
        remedy=(
            "`prepare_data`, `setup` and the loaders of a DataModule are called under one seed "
            "on all ranks; the generators of the process are put back afterwards."
        ),
        fix="A split made outside of a DataModule needs a generator with a fixed seed.",
        component="minitrainer.datamodule.DataModule",
        test="tests/pitfalls/test_data.py::test_a_random_split_is_the_same_on_all_ranks",
        plain="tests/pitfalls/test_data.py::test_a_random_split_is_the_same_on_all_ranks",
    ),
    Entry(
        code="D29",
        title="Every rank downloads or unpacks the data",
        symptom="Files that are broken now and then, because several processes write them.",
        cause="Every rank runs the whole script.",
        remedy=(
            "`prepare_data` runs once per machine, on its first rank, and all others wait for it "
            "before `setup`."
        ),
        component="minitrainer.datamodule.DataModule",
        test="tests/pitfalls/test_data.py::test_data_are_prepared_once",
        plain="tests/pitfalls/test_data.py::test_data_are_prepared_once",
    ),
    Entry(
        code="D30",
        title="The order of samples is not the same on all ranks",
        symptom=(
            "[D30] The 8 train samples that the ranks were dealt are not those of one order: "
            "some were lost or repeated."
        ),
        cause=(
            "The sampler draws from a source that nobody seeds, or looks at the rank, so each "
            "rank is dealt its share of another order."
        ),
        remedy=(
            "At the end of the first epoch the ranks compare digests of what they were dealt "
            "with that of the whole order, in one collective; a warning tells when they do not "
            "add up."
        ),
        fix="Give the sampler a set_epoch that seeds it, and no rank.",
        component="minitrainer.ledger.log_coverage",
        test="tests/pitfalls/test_data.py::test_shares_of_other_orders_are_told_of",
        plain="tests/pitfalls/test_data.py::test_shares_of_other_orders_are_told_of",
    ),
    Entry(
        code="D31",
        title="shuffle and a sampler at once, or neither",
        symptom="ValueError: sampler option is mutually exclusive with shuffle",
        patterns=("sampler option is mutually exclusive with shuffle",),
        cause=(
            "A DistributedSampler takes the place of shuffle=True: with both the loader refuses, "
            "and with a sampler that was made with shuffle=False nothing is shuffled."
        ),
        remedy=(
            "No sampler for ranks is needed: a loader with shuffle=True is shuffled over all "
            "ranks. A DistributedSampler that is there is replaced by its plain order, and a "
            "line says so."
        ),
        fix="Write DataLoader(dataset, shuffle=True) for training.",
        component="minitrainer.data.TrainingData",
        test="tests/data/test_training.py::test_a_distributed_sampler_is_replaced_with_one_notice",
        plain="tests/pitfalls/test_data.py::test_plain_shuffle_beside_a_sampler_is_refused",
        rows=("B8",),
    ),
    Entry(
        code="D32",
        title="The data code looks at the rank",
        symptom="A part of the samples is never trained; no message.",
        cause=(
            "The dataset takes its own share by RANK or world_size, and a sampler takes a share "
            "of that once more."
        ),
        remedy=(
            "`parity` compares the samples of each step on one process and on several ranks, and "
            "says how many are others."
        ),
        fix="Leave the sharing to the trainer: no rank and no world_size in data code.",
        component="minitrainer.parity.compare_layouts",
        test="tests/parity/test_planted_faults.py::test_a_fault_in_the_data_is_named",
        plain="tests/pitfalls/test_data.py::test_plain_shares_of_shares",
    ),
    Entry(
        code="D33",
        title="A sample depends on what was read before it",
        symptom=(
            "Results change with the number of workers, the batch size or a resume; no message."
        ),
        cause=(
            "The dataset keeps state between items (a counter, a running mean, a file position), "
            "or the collate function pads in a way that changes the result."
        ),
        remedy="`parity` names it: the same step has other samples in another layout.",
        fix="Let an item depend on its index only.",
        component="minitrainer.parity.compare_layouts",
        test="tests/parity/test_planted_faults.py::test_a_fault_in_the_data_is_named",
        plain="tests/pitfalls/test_data.py::test_plain_state_of_a_dataset_is_that_of_its_worker",
    ),
    Entry(
        code="D34",
        title="A loader worker dies: shared memory or open files",
        symptom=(
            "RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory. Or: Too many open "
            "files; received 0 items of ancdata."
        ),
        patterns=(
            r"DataLoader worker \(pid\(?s?\)?.*(killed by signal|exited unexpectedly)",
            "out of shared memory",
            "Too many open files",
            "received 0 items of ancdata",
        ),
        cause=(
            "Workers hand batches over in /dev/shm, 64 MB in a container by default, and keep a "
            "file open for each tensor. Killed, mostly, for lack of memory."
        ),
        remedy=(
            "`doctor` tells how much room /dev/shm has and how many files may be open. In a run, "
            "the rank whose worker died is named, with torch's message."
        ),
        fix=(
            "Start the container with --shm-size=8g or --ipc=host; ulimit -n 65536; or fewer "
            "workers, which count per rank."
        ),
        component="minitrainer.doctor.environment.shared_memory",
        test="tests/doctor/test_environment.py::test_what_is_wrong_is_told_with_numbers",
        plain="tests/pitfalls/test_data.py::test_plain_worker_without_shared_memory",
    ),
)
