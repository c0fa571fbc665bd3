"""The tap rule against the published drafters' layer ids, and layer lists that cannot be."""

from __future__ import annotations

import pytest

from dflash_stream.errors import UserError
from dflash_stream.target.layers import check_layers, dflash_layers, find_backbone

PUBLISHED = {
    36: [1, 9, 17, 25, 33],
    64: [1, 16, 31, 46, 61],
    40: [1, 10, 19, 28, 37],
    32: [1, 8, 15, 22, 29],
    28: [1, 7, 13, 19, 25],
    24: [1, 6, 11, 16, 21],
    62: [1, 16, 30, 44, 59],
    30: [1, 8, 14, 20, 27],  # 20.5 rounds to even
}


@pytest.mark.parametrize(("num_layers", "layers"), PUBLISHED.items())
def test_rule_departs_from_the_published_layers(num_layers: int, layers: list[int]) -> None:
    assert dflash_layers(num_layers, 5) == layers


def test_rule_for_other_numbers_of_taps() -> None:
    assert dflash_layers(40, 8) == [1, 6, 11, 16, 22, 27, 32, 37]
    assert dflash_layers(36, 1) == [18]


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 2), (7, 5), (3, 3), (1, 2)])
def test_a_shallow_target_gives_repeated_taps(num_layers: int, num_taps: int) -> None:
    with pytest.raises(UserError, match=r"prepare\.num_taps"):
        dflash_layers(num_layers, num_taps)


@pytest.mark.parametrize("layers", [[], [0, 4], [-1, 2], [2, 1], [1, 1]])
def test_impossible_layers_are_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"prepare\.layers"):
        check_layers(layers, 4)


def test_first_and_last_layer_may_be_tapped() -> None:
    assert check_layers([0, 3], 4) == [0, 3]


def test_a_model_without_decoder_layers_is_refused() -> None:
    from torch import nn

    with pytest.raises(UserError, match="Linear"):
        find_backbone(nn.Linear(2, 2))
