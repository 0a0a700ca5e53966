"""Thresholds by layer: the best of all choices, for samples by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks.accuracy import thresholds


@pytest.fixture
def all_where_it_gains(monkeypatch):
    monkeypatch.setattr(thresholds, "EVEN", 0.0)


def test_every_layer_has_its_part_of_half():
    cosines = torch.linspace(0, 0.99, 100)
    useful, useless = (torch.stack((cosines, gains), -1) for gains in ((cosines < 0.5).float(), torch.zeros(100)))
    assert thresholds.counts_of([useless, useful], 0.2) == [10, 30]
    assert thresholds.taus_of([useless, useful], 0.2) == [pytest.approx(0.095), pytest.approx(0.295)]


def test_a_layer_whose_corrections_gain_nothing_gets_none(all_where_it_gains):
    cosines = torch.linspace(0, 0.99, 100)
    useful = torch.stack((cosines, (cosines < 0.5).float()), -1)
    useless, harmful = torch.stack((cosines, torch.zeros(100)), -1), torch.stack((cosines, torch.full((100,), -0.1)), -1)
    layers = [useless, useful, harmful]
    assert thresholds.taus_of(layers, 0.1) == [-1.0, pytest.approx(0.295), -1.0]
    assert thresholds.taus_of(layers, 0.9) == [-1.0, pytest.approx(0.495, abs=0.03), -1.0]
    assert thresholds.kept(layers[:2], [-1.0, 0.295]) == (0.15, pytest.approx(30 / 50))
    always = torch.stack((cosines, torch.ones(100)), -1)
    assert thresholds.taus_of([always, useless], 0.5) == [1.0, -1.0] and thresholds.kept([always, useless], [1.0, -1.0]) == (0.5, 1.0)


def test_no_other_thresholds_of_as_many_corrections_gain_more(monkeypatch, all_where_it_gains):
    monkeypatch.setattr(thresholds, "BINS", 8)
    for seed in range(20):
        torch.manual_seed(seed)
        layers = [torch.stack((torch.rand(8), torch.randn(8) + weight), -1) for weight in (0.2, 0.5, 0.1)]
        sums = [torch.cat((torch.zeros(1), each[each[:, 0].argsort(), 1].cumsum(0))).tolist() for each in layers]
        pieces = sorted((p for at, each in enumerate(layers) for p in thresholds.pieces(at, each[each[:, 0].argsort(), 1])), reverse=True)
        share, left = 0, [piece.count for piece in pieces if piece.gain > 0]
        for count in left:  # where whole pieces are taken
            share += count
            counts = thresholds.counts_of(layers, share / 24)
            assert sum(counts) == share
            best = max(sum(s[c] for s, c in zip(sums, cs)) for cs in product(range(9), repeat=3) if sum(cs) <= share)
            assert sum(s[c] for s, c in zip(sums, counts)) == pytest.approx(best, abs=1e-5)


def test_a_threshold_corrects_as_many_as_were_counted():
    cosines = torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert [int((cosines < thresholds.tau_of(cosines, count)).sum()) for count in range(51)] == list(range(51))
