"""Which callbacks override which hook, worked out once before the loop."""

from __future__ import annotations

from collections.abc import Sequence

from minitrainer.callback import Callback


def overriding(callbacks: Sequence[Callback], hook: str) -> list[Callback]:
    """Return the callbacks whose class has a hook of its own, in the order given."""
    plain = getattr(Callback, hook)
    return [callback for callback in callbacks if getattr(type(callback), hook) is not plain]


class Hooks:
    """For each hook of the training loop, the callbacks that override it.

    A hook nobody overrides is an empty list: it costs a loop over nothing. They are called by
    name, `for callback in hooks.train_step_end: callback.on_train_step_end(...)`, so that "find
    usages" works in an editor.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        self.fit_start = overriding(callbacks, "on_fit_start")
        self.fit_end = overriding(callbacks, "on_fit_end")
        self.train_epoch_start = overriding(callbacks, "on_train_epoch_start")
        self.train_epoch_end = overriding(callbacks, "on_train_epoch_end")
        self.train_batch_start = overriding(callbacks, "on_train_batch_start")
        self.train_batch_end = overriding(callbacks, "on_train_batch_end")
        self.train_step_end = overriding(callbacks, "on_train_step_end")
        self.save_point = overriding(callbacks, "on_save_point")
        self.exception = overriding(callbacks, "on_exception")
