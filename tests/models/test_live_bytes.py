"""What is counted on tensors without data, against what torch's profiler sees allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from shardwise.models._torch_private import FakeTensorMode
from shardwise.models.live_bytes import LiveBytes

WORDS, WIDTH, TOKENS = 5000, 64, 16


class Transposed(nn.Module):
    """One matrix at both ends, whose two gradients, of 1.28 MB each, are the most there is.

    The first one is a view that is not contiguous, and nothing can be added to it.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.empty(WORDS, WIDTH))
        self.seen = []

    def forward(self, ids):
        return F.linear(F.embedding(ids, self.words), self.words)


class InPlace(Transposed):
    """The first one is added to."""

    def forward(self, ids):
        return self.words @ F.embedding(ids, self.words).t()


class Held(Transposed):
    """Somebody else holds the first one."""

    def forward(self, ids):
        one, other = self.words * 1.0, self.words * 2.0
        one.register_hook(self.seen.append)
        (one.sum() + (one @ F.embedding(ids, other).t()).sum()).backward()
        return torch.zeros(())


class NotBackward(Transposed):
    """Sums of a forward pass are always new."""

    def forward(self, _):
        return (self.words.detach() * 2 + self.words.detach()).sum()


def run(model):
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    loss = model(ids).sum()
    if loss.requires_grad:
        loss.backward()


def allocated(model):
    """The most bytes that were alive at once, over those at the beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run(model)
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def counted(model):
    with FakeTensorMode():
        fake = type(model)()
        watch = LiveBytes((*fake.parameters(), *fake.buffers()))
        with watch:
            run(fake)
    return watch.peak


@pytest.mark.parametrize("kind", [Transposed, InPlace, Held, NotBackward])
def test_as_allocated(kind):
    model = kind()
    run(model)  # torch's own, once
    model.zero_grad(set_to_none=True)
    model.seen.clear()  # what is let go while the profiler looks on would count
    assert counted(model) == pytest.approx(allocated(model), rel=0.01)
