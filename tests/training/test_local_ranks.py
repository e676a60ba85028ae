"""`Trainer(devices=2).fit()` from a process that goes on afterwards."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import minitrainer as mt
from minitrainer.errors import DevicesError, RankFailedError, SettingError
from tests.toys import Lin, loader, quiet


class Validating(Lin):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.world_size == 2
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", (self.w * batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch + self.global_rank * 0


def test_weights_metrics_and_counters_come_back() -> None:
    """Case B1, second part: a second Trainer in one script; global_step restarts at 0."""
    for _ in range(2):
        module = Validating()
        checkpoint = mt.ModelCheckpoint(monitor="x")
        trainer = quiet(devices=2, callbacks=[checkpoint], run_dir="run")
        trainer.fit(module, loader([1, 2, 3, 5]), loader([1.0]))
        # Two global batches: means of (1, 2) and (3, 5).
        assert module.w.item() == -5.5
        assert trainer.global_step == 2
        assert trainer.current_epoch == 1
        assert trainer.callback_metrics == {"x": -5.5}
        assert os.path.isfile(checkpoint.best_model_path)
        assert checkpoint.best_model_score == -5.5


def test_the_process_is_as_it_was() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment, threads = dict(os.environ), torch.get_num_threads()
    quiet(devices=2).fit(Validating(), loader([1.0, 2.0]))
    assert dict(os.environ) == environment
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert torch.get_num_threads() == threads


def test_lambdas_and_local_classes_need_no_pickling() -> None:
    data = torch.utils.data.DataLoader(
        [(1.0, lambda x: x)] * 4,  # type: ignore[arg-type]
        collate_fn=lambda items: torch.tensor([value for value, _ in items]),
    )
    module = Validating()
    module.hook = lambda: 3  # type: ignore[assignment]
    quiet(devices=2).fit(module, data)
    assert module.w.item() == -2.0


def test_validate_and_predict_on_local_ranks() -> None:
    module = Validating()
    torch.nn.init.ones_(module.w)
    assert quiet(devices=2).validate(module, loader(range(21), batch_size=4)) == {"x": 10.0}
    outputs = quiet(devices=2).predict(module, loader(range(5), batch_size=2))
    assert [output.tolist() for output in outputs] == [[0, 1], [2, 3], [4]]


def test_from_another_thread() -> None:
    module = Validating()
    thread = threading.Thread(target=lambda: quiet(devices=2).fit(module, loader([1.0, 2.0])))
    thread.start()
    thread.join()
    assert module.w.item() == -1.5


def test_a_rank_that_raises_is_named_and_its_hook_ran() -> None:
    """Case B19, in one process: the others sit in a collective and are ended."""

    class Failing(Validating):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1 and batch_idx == 2:
                raise ValueError("boom")
            return super().training_step(batch, batch_idx)

    class Note(mt.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            with open(f"exception-{trainer.global_rank}", "a") as file:
                file.write(f"{exception}\n")

    with pytest.raises(RankFailedError, match=r"Rank 1.*boom") as raised:
        quiet(devices=2, callbacks=[Note()]).fit(Failing(), loader([1.0] * 200))
    assert 'raise ValueError("boom")' in str(raised.value)
    with open("exception-1") as file:
        assert file.read() == "boom\n"


def test_what_the_user_got_wrong_keeps_its_class() -> None:
    with pytest.raises(SettingError, match="longer than the epoch"):
        quiet(devices=2, val_check_interval=9).fit(Validating(), loader([1.0] * 4), loader([1.0]))


@pytest.mark.parametrize("devices", [0, -1, True, 1.5])
def test_refuses_numbers_of_devices_that_make_no_sense(devices: Any) -> None:
    with pytest.raises(DevicesError, match="L02"):
        quiet(devices=devices).fit(Lin(), loader([1.0]))


def test_refuses_gpus_that_are_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(DevicesError, match=str(count)):
        quiet(accelerator="cuda", devices=count + 1).fit(Lin(), loader([1.0]))
