"""Live evaluation with a target that really runs: prepared, extracted, trained on, then decoded with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_stream.config import Config, TargetSettings, build
from dflash_stream.errors import UserError
from dflash_stream.extract import extract
from dflash_stream.head import load_head, write_head
from dflash_stream.run import Run
from dflash_stream.store import open_store
from dflash_stream.stream.loader import validation_samples
from dflash_stream.stream.sample import Sample
from dflash_stream.target.load import load_target
from tests.tiny_runs import publish_run
from tests.tiny_targets import VOCAB, save_tiny
from tests.train.tiny_pair import fit
from train import live
from train.decode import acceptance_walk, speculative_generate
from train.drafter import Drafter
from train.evaluate import evaluate
from train.export import find_newest
from train.trainer import train

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{% if enable_thinking %}!{% endif %}"
)
CHATS = [
    {"messages": [{"role": "user", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "add 2 and 3"}, {"role": "assistant", "content": "5"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    },
    {"messages": [{"role": "user", "content": "never reached"}]},
]


def save_tokenizer(directory: Path) -> None:
    """A token for each printable character."""
    vocabulary = {chr(code): code for code in range(32, 127)} | {"?": 63}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of a tiny hybrid target, extracted in fp32, with a drafter trained on it for a few steps."""
    directory = tmp_path_factory.mktemp("live")
    target = save_tiny("qwen3_5", directory / "target")
    save_tokenizer(target)
    config = build(
        {
            "store": {"url": f"file://{directory}/run", "pool_bytes": 10 << 20, "part_bytes": 5 << 20},
            "target": {"id": str(target), "dtype": "float32"},
            "drafter": {
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "intermediate_size": 64, "block_size": 4, "mask_token_id": VOCAB - 1,
            },
            "train": {"epochs": 8.0, "batch_samples": 4, "lr": 1e-2, "precision": "fp32"},
            "tracking": {"wandb": False},
        }
    )  # fmt: skip
    store = open_store(config.store)
    publish_run(store, target, units=3, new_tokens=24)
    write_head(store, config.store, config.target)
    extract(config)
    train(config)
    return config


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(chat) for chat in CHATS) + "\n")
    return path


def test_live_report_on_a_recurrent_target(config: Config, prompts: Path) -> None:
    report = evaluate(config, live_prompts=prompts, live_samples=3, new_tokens=20)
    assert report.trained is not None
    found = report.live
    assert found is not None
    assert (found.prompts, found.equal_texts) == (3, 3)
    assert found.acceptance_length == found.tokens / found.rounds
    assert 1 <= found.interval[0] <= found.acceptance_length <= found.interval[1] <= 4
    assert found.target_forwards > found.rounds, "a recurrent target replays what it accepted"
    assert json.loads(report.to_json())["live"]["prompts"] == 3
    assert "3 of 3" in report.to_text()


def test_walk_over_stored_states_gives_the_live_rounds(config: Config) -> None:
    """What a trainer sees through the store, bf16 states and all, is what decoding with the target does."""
    store = open_store(config.store)
    run = Run.open(store)
    head = load_head(store, dtype=torch.float32)
    samples = [_own_text(sample) for sample in validation_samples(store, run, config)]
    _, _, drafter_config = find_newest(store, run, config.train.name)
    drafter = fit(Drafter(drafter_config).initialize(0), head, samples, 120)
    target = load_target(config.target, layers=run.identity.layers, whole=True, device="cpu")
    rounds, same = [], 0
    for sample in samples:
        text, prompt_tokens = sample.input_ids.tolist(), sample.greedy_prompt_tokens
        prompt = text[:prompt_tokens]
        made = speculative_generate(target, drafter, head, prompt, len(text) - prompt_tokens)
        assert prompt + made.tokens == text
        rounds.append(acceptance_walk(drafter, head, sample.input_ids, sample.hidden_states, prompt_tokens))
        same += rounds[-1] == made.lengths
    assert {1, 2, 3, 4} <= {length for walk in rounds for length in walk}, "too easy or too hard to tell"
    assert same >= len(samples) - 1, "the stored states are rounded to bf16: a near-tie may fall the other way"


def _own_text(sample: Sample) -> Sample:
    """A held-out sample with the target's own text in place of the data set's."""
    assert sample.greedy_input_ids is not None
    assert sample.greedy_hidden_states is not None
    mask = torch.arange(len(sample.greedy_input_ids)) >= sample.greedy_prompt_tokens
    return replace(
        sample, input_ids=sample.greedy_input_ids, hidden_states=sample.greedy_hidden_states, loss_mask=mask
    )


def test_prompt_ends_where_the_assistant_begins_in_the_runs_thinking_mode(
    config: Config, prompts: Path
) -> None:
    store = open_store(config.store)
    identity = Run.open(store).identity
    rendered = ["".join(map(chr, ids)) for ids in live.read_prompts(store, identity, prompts, 3)]
    assert rendered == ["<u>hello;<a>", "<u>add 2 and 3;<a>", "<u>a;<a>b;<u>c;<a>"]
    text = identity.text.model_copy(update={"thinking": True})
    thinking = live.read_prompts(store, identity.model_copy(update={"text": text}), prompts, 1)
    assert "".join(map(chr, thinking[0])) == "<u>hello;<a>!"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"line 1 is no chat"),
        ('{"text": "hello"}', r"line 1 is no chat.*messages"),
        ('["hello"]', r"line 1 is no chat"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', r"line 1: no message that asks"),
        ("", r"has no chats"),
    ],
)
def test_unusable_prompts_are_named_before_anything_is_loaded(
    config: Config, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        evaluate(config, live_prompts=path)
    with pytest.raises(UserError, match="cannot read"):
        evaluate(config, live_prompts=tmp_path / "absent.jsonl")


def test_counts_that_leave_nothing_to_decode_are_refused(config: Config, prompts: Path) -> None:
    for counts in ({"live_samples": 0}, {"new_tokens": 1}):
        with pytest.raises(UserError, match="at least one prompt and two new tokens"):
            evaluate(config, live_prompts=prompts, **counts)


def test_a_target_that_is_left_out_is_the_runs(config: Config, prompts: Path) -> None:
    without = config.model_copy(update={"target": TargetSettings()})
    found = evaluate(without, live_prompts=prompts, new_tokens=8).live
    assert found is not None
    assert found.equal_texts == found.prompts


def test_another_target_than_the_runs_is_refused(config: Config, prompts: Path, tmp_path: Path) -> None:
    other = save_tiny("qwen3", tmp_path / "other")
    changed = config.model_copy(update={"target": config.target.model_copy(update={"id": str(other)})})
    with pytest.raises(UserError, match="is another model than"):
        evaluate(changed, live_prompts=prompts)


def test_text_that_differs_from_greedy_is_an_error_in_float32(
    config: Config, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(*arguments: Any) -> Any:
        made = speculative_generate(*arguments)
        return replace(made, tokens=[*made.tokens[:3], made.tokens[3] + 1, *made.tokens[4:]])

    monkeypatch.setattr(live, "speculative_generate", lossy)
    with pytest.raises(UserError, match=r"prompt 1: .* from token 3 on"):
        evaluate(config, live_prompts=prompts, live_samples=1, new_tokens=8)
