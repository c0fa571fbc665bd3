"""Tapped states against transformers' own hidden states, for every supported family and its wrapper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.target.layers import find_backbone
from dflash_stream.target.load import Target, load_target
from tests.tiny_targets import FAMILIES, VOCAB, save_tiny

LAYERS = [1, 3, 5]
CUT_SHORT = set(FAMILIES) - {"gpt_oss"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def settings(path: Path, dtype: Any = "float32") -> TargetSettings:
    attention: Any = "eager" if path.name.startswith(("gpt_oss", "gemma2")) else "sdpa"
    return TargetSettings(id=str(path), dtype=dtype, attention=attention)


def load(path: Path, whole: bool = False, layers: list[int] = LAYERS, **options: Any) -> Target:
    return load_target(settings(path), layers=layers, whole=whole, device="cpu", **options)


def texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference(path: Path, tokens: list[int]) -> list[torch.Tensor]:
    """hidden_states of the whole model as saved, run on one unpadded text."""
    import transformers

    model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    model = model_class.from_pretrained(path, dtype=torch.float32, attn_implementation=settings(path).attention)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return [state[0] for state in out.hidden_states]


def assert_close(states: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Equal up to the rounding to bfloat16 (2**-8 of the value) and `tolerance` of the largest value."""
    error = (states.float() - expected).abs() - expected.abs() * 2**-8
    assert float(error.max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_states_differ_from_output_hidden_states(family: str, tiny: Callable[[str], Path]) -> None:
    path = tiny(family)
    batch = texts(20, 3, 11)
    for tokens, states in zip(batch, load(path).states(batch), strict=True):
        expected = reference(path, tokens)
        assert states.shape == (len(tokens), len(LAYERS), 32)
        for place, layer in enumerate(LAYERS):
            assert_close(states[:, place], expected[layer + 1])
            neighbours = [(expected[other] - expected[layer + 1]).abs().max() for other in (layer, layer + 2)]
            assert min(neighbours) > 0.05, "this model could not tell a layer from its neighbour"


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_after_the_last_tap_are_loaded_or_run(family: str, tiny: Callable[[str], Path]) -> None:
    target = load(tiny(family))
    assert len(target.layers) == (LAYERS[-1] + 1 if family in CUT_SHORT else 8)
    whole = load(tiny(family), whole=True)
    assert len(whole.layers) == 8
    calls: list[str] = []
    for number, layer in enumerate(whole.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: calls.append(str(number)))
    whole.backbone.norm.register_forward_pre_hook(lambda *_: calls.append("norm"))
    whole.model.get_output_embeddings().register_forward_pre_hook(lambda *_: calls.append("lm_head"))
    (states,) = whole.states(texts(9))
    assert calls == ["0", "1", "2", "3", "4", "5"]
    torch.testing.assert_close(states, target.states(texts(9))[0])


@pytest.mark.parametrize("family", ["llama", "gemma3_wrapper", "qwen3_5_wrapper"])
def test_final_state_is_normed(family: str, tiny: Callable[[str], Path]) -> None:
    """The last entry of output_hidden_states is after the norm; the stored final state is before it."""
    target = load(tiny(family), final_state=True)
    (tokens,) = texts(12)
    (states,) = target.submit([tokens]).wait()
    assert states.final_state is not None
    assert states.hidden_states.shape == (12, 3, 32)
    assert states.hidden_states.is_contiguous()
    expected = reference(tiny(family), tokens)
    assert_close(target.backbone.norm(states.final_state.float()), expected[-1], tolerance=4e-3)
    assert (states.final_state.float() - expected[-1]).abs().max() > 0.1
    assert_close(states.hidden_states[:, 0], expected[LAYERS[0] + 1])


def test_last_layer_cannot_be_tapped(tiny: Callable[[str], Path]) -> None:
    target = load(tiny("qwen3_5"), layers=[0, 7], final_state=True)
    (states,) = target.submit(texts(6)).wait()
    assert states.final_state is not None
    torch.testing.assert_close(states.hidden_states[:, 1], states.final_state)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_depend_on_the_composition_of_the_batch(family: str, tiny: Callable[[str], Path]) -> None:
    """Tolerance in fp32: a step of bfloat16 (2**-7 of the value) where rounding tips, 1e-4 of the largest."""
    target = load(tiny(family))
    batch = texts(17, 1, 30, 9, 2, seed=3)
    alone = [target.states([tokens])[0] for tokens in batch]
    for composition in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 3]):
        together = target.states([batch[i] for i in composition])
        for i, states in zip(composition, together, strict=True):
            error = (states.float() - alone[i].float()).abs() - alone[i].float().abs() * 2**-7
            assert float(error.max()) <= 1e-4 * float(alone[i].float().abs().max())


def test_not_finite_states_go_unnoticed(tiny: Callable[[str], Path]) -> None:
    target = load(tiny("llama"))
    with torch.no_grad():
        target.model.get_input_embeddings().weight[7] = float("nan")
    bad, good = target.submit([[5, 7, 9], [5, 6, 9, 8]]).wait()
    assert bad.problem == "states of layer 1, 3, 5 are not finite"
    assert good.problem == ""


def test_constant_states_go_unnoticed(tiny: Callable[[str], Path]) -> None:
    target = load(tiny("llama"))
    target.layers[3].register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
    several, single = target.submit([[5, 6, 9], [5]]).wait()
    assert several.problem == "states of layer 3, 5 are the same at every position"
    assert single.problem == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_differs_from_generating_alone(family: str, tiny: Callable[[str], Path]) -> None:
    """A batch of prompts of different lengths continues as each does alone, token for token."""
    target = load(tiny(family), whole=True)
    prompts = texts(13, 2, 7, 20, seed=5)
    together = target.greedy(prompts, 12)
    for prompt, made in zip(prompts, together, strict=True):
        out = target.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert made == out[0, len(prompt) :].tolist()
        full = torch.tensor([prompt + made])  # and as the argmax of a plain forward says
        with torch.no_grad():
            logits = target.model(input_ids=full, use_cache=False).logits[0]
        assert made == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({tuple(made) for made in together}) > 1


def test_greedy_obeys_the_checkpoints_sampling(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Sampling and penalties of a generation config leave the argmax as it is; its end tokens count."""
    plain = load(tiny("llama"), whole=True)
    (prompt,) = texts(6, seed=8)
    (made,) = plain.greedy([prompt], 10)
    import shutil

    import transformers

    shutil.copytree(tiny("llama"), tmp_path / "model")
    transformers.GenerationConfig(
        do_sample=True, temperature=3.0, top_k=5, repetition_penalty=5.0, eos_token_id=[made[3], 2]
    ).save_pretrained(tmp_path / "model")
    expected = made[: made.index(made[3]) + 1]
    other = load(tmp_path / "model", whole=True)
    assert other.greedy([prompt], 10) == [expected]


def test_loading_complains_about_the_layers_left_out(
    tiny: Callable[[str], Path], capfd: Any, caplog: Any
) -> None:
    capfd.readouterr()
    load(tiny("llama"))
    shown = "".join(capfd.readouterr()) + caplog.text
    assert "UNEXPECTED" not in shown
    assert "layers.6" not in shown


def test_missing_weights_are_made_up(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny("qwen3"), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights .*layers\.2\.mlp\.up_proj"):
        load(tmp_path / "model")


def test_a_missing_model_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.id"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"target\.id is empty"):
        load_target(TargetSettings(), layers=[0], whole=False, device="cpu")


@pytest.mark.parametrize("family", [family for family in FAMILIES if "wrapper" in family])
def test_layers_of_a_vision_tower_are_taken(family: str, tiny: Callable[[str], Path]) -> None:
    """The tower of the wrappers here has as many layers as the text model."""
    import transformers

    model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(tiny(family)).architectures[0])
    _, layers = find_backbone(model_class.from_pretrained(tiny(family)))
    assert len(layers) == 8
    assert "Decoder" in type(layers[0]).__name__
