"""Every setting of every phase, typed, with its unit and default; one YAML a run, overridable on the command line.

A default stands here and nowhere else. `load` merges, in rising order of precedence: the defaults, the YAML file of
`--config`, and `--section.name value` arguments. Unknown names are refused with the nearest valid one. Secrets are not
settings: they come from the standard AWS chain and the environment.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from dflash_stream.errors import UserError

MiB = 1 << 20
GiB = 1 << 30

Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of settings that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def setting(default: Any, help: str, unit: str = "", **limits: Any) -> Any:
    """One setting: its default, what it does, and its unit (shown by --help)."""
    return Field(default=default, description=help, json_schema_extra={"unit": unit}, **limits)


class StoreSettings(Section):
    """Where the run lives, and how hard the store is worked."""

    url: str = setting("", "where the run lives: s3://bucket/prefix, or file:///directory")
    endpoint: str | None = setting(
        None, "URL of an S3-compatible endpoint; otherwise AWS_ENDPOINT_URL_S3, otherwise AWS itself"
    )
    region: str | None = setting(
        None, "region of the bucket; otherwise the standard AWS chain, otherwise us-east-1"
    )
    addressing: Literal["path", "virtual"] = setting("path", "path-style or virtual-hosted-style addressing")
    checksums: bool = setting(
        True, "send a CRC32C with every upload request; turn off for stores that refuse it"
    )
    max_concurrent_uploads: int = setting(
        16, "upload requests in flight in each process", "requests", ge=1, le=100
    )
    part_bytes: int = setting(
        16 * MiB, "size of a multipart part; raised by itself for objects of more than 9,000 parts", "bytes",
        ge=5 * MiB, le=5 * GiB,
    )  # fmt: skip
    pool_bytes: int = setting(
        512 * MiB, "memory for parts being filled or sent in each process; when full, the producer waits", "bytes",
        ge=10 * MiB,
    )  # fmt: skip
    timeout_s: float = setting(
        60.0, "longest silence on a connection before a request is tried again", "s", gt=0
    )
    deadline_s: float = setting(900.0, "longest time a request is retried before the run stops", "s", gt=0)


class TargetSettings(Section):
    """The model that the drafter is made for."""

    id: str = setting("", "the target model: a Hugging Face id or a local directory")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    dtype: Literal["bfloat16", "float32", "float16"] = setting("bfloat16", "dtype the target runs in")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = setting(
        "sdpa", "attention implementation of the target"
    )
    trust_remote_code: bool = setting(False, "run model code that comes with the checkpoint")


class PrepareSettings(Section):
    """What becomes a sample, and what is kept of it. Fixed for a run, but for `workers`."""

    inputs: list[str] = setting([], "JSONL or Parquet files or globs of chats, or of input_ids and loss_mask")
    validation_inputs: list[str] = setting(
        [], "files or globs of held-out chats; empty: a fraction of the inputs"
    )
    validation_fraction: float = setting(
        0.01, "share of conversations held out, by hash, when validation_inputs is empty", "", ge=0, lt=1
    )
    max_validation_samples: int = setting(512, "held-out samples at most", "samples", ge=0)
    max_samples: int | None = setting(
        None, "training samples at most (the first ones in seeded order)", "samples"
    )
    max_total_tokens: int | None = setting(
        None, "training tokens at most (the first ones in seeded order)", "tokens"
    )
    max_tokens: int = setting(2048, "longest sample", "tokens", ge=4)
    truncation: Literal["right", "drop"] = setting(
        "right", "a sample that is longer is cut on the right, or dropped"
    )
    thinking: bool | None = setting(
        None, "enable_thinking for the chat template; unset: the template's own default"
    )
    template_kwargs: dict[str, JsonValue] = setting(
        {}, "further variables for the chat template, as YAML: {name: value}"
    )
    turns: Literal["all", "last", "each"] = setting(
        "all",
        "assistant turns supervised: all, the last one, or one sample for each turn with its history as served",
    )
    min_supervised_tokens: int = setting(2, "samples with fewer supervised tokens are dropped", "tokens", ge=2)
    max_rejected_fraction: float = setting(0.05, "share of bad rows over which prepare stops", "", ge=0, le=1)
    layers: list[int] | None = setting(
        None, "decoder layers to tap (0-based, their output); unset: the DFlash rule for num_taps layers"
    )
    num_taps: int = setting(5, "decoder layers to tap by the DFlash rule", "layers", ge=1)
    codec: Literal["bf16", "bf16z", "fp8"] = setting(
        "bf16", "how states are stored: raw, lossless compressed, or e4m3"
    )
    final_state: Literal["none", "pre_norm"] = setting(
        "none", "also store the last layer's output, before the norm"
    )
    validation_new_tokens: int = setting(
        256, "the target's greedy continuation of each held-out prompt; 0: none", "tokens", ge=0
    )
    unit_bytes: int = setting(4 * GiB, "size of a unit of work, and so of a shard", "bytes", ge=MiB)
    seed: int = setting(0, "seed of the shuffle")
    workers: int | None = setting(None, "tokenising processes; unset: all cores", "processes")


class ExtractSettings(Section):
    """How a process extracts; nothing here alters which samples a shard holds."""

    tokens_per_batch: int = setting(16384, "padded tokens in a forward pass", "tokens", ge=1)
    max_bad_fraction: float = setting(
        0.001, "share of refused samples in a unit over which the run stops", "", ge=0
    )
    claim_ttl_s: float = setting(120.0, "a claim on a unit lapses when not renewed for this long", "s", gt=0)
    grace_s: float = setting(20.0, "after SIGTERM or SIGINT, time to finish or abort uploads", "s", gt=0, le=25)


class DrafterSettings(Section):
    """Geometry of the drafter, under the names of the published config.json."""

    num_hidden_layers: int = setting(5, "decoder layers of the drafter", "layers", ge=1)
    num_attention_heads: int = setting(32, "query heads", "heads", ge=1)
    num_key_value_heads: int = setting(8, "key and value heads", "heads", ge=1)
    head_dim: int = setting(128, "width of a head", "dimensions", ge=2)
    intermediate_size: int = setting(12288, "width of the MLP", "dimensions", ge=1)
    block_size: int = setting(16, "tokens in a block, the anchor included", "tokens", ge=2)
    mask_token_id: int | None = setting(
        None, "id of an unused row of the target's embedding, read as the mask token"
    )
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = setting(
        None, "attention of each drafter layer; unset: all full_attention"
    )
    sliding_window: int | None = setting(
        None, "window of sliding_attention layers, the query included", "tokens"
    )
    rope_theta: float = setting(1e6, "base of the rotary embedding", "", gt=0)
    rms_norm_eps: float = setting(1e-6, "epsilon of the norms", "", gt=0)
    max_position_embeddings: int = setting(40960, "longest context the drafter is declared for", "tokens", ge=1)


class TrainSettings(Section):
    """The recipe, and how a step is cut into micro-batches."""

    name: str = setting("drafter", "name of the drafter: its objects lie under drafters/NAME/")
    epochs: float = setting(6.0, "passes over the training samples", "epochs", gt=0, allow_inf_nan=False)
    max_steps: int | None = setting(None, "stop earlier than epochs would", "steps", ge=1)
    batch_samples: int = setting(
        32, "samples in a global batch, whatever the number of processes", "samples", ge=1
    )
    tokens_per_batch: int = setting(8192, "padded tokens in a micro-batch of one process", "tokens", ge=1)
    blocks_per_batch: int = setting(
        2048,
        "padded draft blocks in a micro-batch of one process, which take most of its memory",
        "blocks",
        ge=1,
    )
    anchors: int = setting(512, "blocks drawn from a sample at most", "blocks", ge=1)
    loss_gamma: float | None = setting(
        None, "decay of the loss over a block; unset: 7, 5 or 4 for block 16, 10 or 8", "tokens", gt=0
    )
    lr: float = setting(6e-4, "peak learning rate", "", gt=0)
    min_lr_ratio: float = setting(0.0, "learning rate at the end over the peak", "", ge=0, le=1)
    warmup_fraction: float = setting(0.04, "share of the steps spent warming up", "", ge=0, le=1)
    weight_decay: float = setting(0.0, "AdamW weight decay of matrices", "", ge=0)
    betas: tuple[Beta, Beta] = setting((0.9, 0.95), "AdamW betas")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", "", gt=0)
    precision: Literal["bf16", "fp32"] = setting("bf16", "compute dtype; weights and optimizer are fp32")
    attention: Literal["auto", "sdpa", "grouped", "flex"] = setting(
        "auto", "drafter attention; auto: flex on CUDA, else grouped"
    )
    gradient_checkpointing: bool = setting(False, "recompute activations of the drafter layers")
    head_chunk_rows: int = setting(2048, "rows that go through lm_head at a time", "rows", ge=1)
    seed: int = setting(0, "seed of the weights, the order and the anchors")
    checkpoint_every_steps: int = setting(500, "steps between checkpoints", "steps", ge=1)
    keep_checkpoints: int = setting(2, "checkpoints kept", "checkpoints", ge=1)
    validate_every_steps: int = setting(
        500, "steps between validations; the end is always validated", "steps", ge=1
    )
    validation_samples: int = setting(
        64, "held-out samples of a validation; the last one takes all", "samples", ge=1
    )
    log_every_steps: int = setting(10, "steps between logged figures", "steps", ge=1)


class StreamSettings(Section):
    """How training reads: only `block_bytes` alters the order of samples."""

    block_bytes: int = setting(8 * MiB, "consecutive samples that are shuffled as one, at least", "bytes", ge=1)
    range_bytes: int = setting(8 * MiB, "size of a ranged read", "bytes", ge=64 << 10)
    threads: int = setting(16, "ranged reads in flight in each process", "requests", ge=1)
    prefetch_bytes: int = setting(512 * MiB, "samples read ahead in each process, at most", "bytes", ge=1)
    stall_s: float = setting(
        120.0, "without a sample for this long, the requests in flight are logged", "s", gt=0
    )


class TrackingSettings(Section):
    """Where figures go."""

    wandb: bool = setting(True, "log to wandb; offline by itself when no key is set")
    project: str = setting("dflash-stream", "wandb project")
    directory: str | None = setting(None, "where wandb keeps its files; unset: ./wandb")


class Config(Section):
    """All settings of a run: one section a room."""

    store: StoreSettings = StoreSettings()
    target: TargetSettings = TargetSettings()
    prepare: PrepareSettings = PrepareSettings()
    extract: ExtractSettings = ExtractSettings()
    drafter: DrafterSettings = DrafterSettings()
    train: TrainSettings = TrainSettings()
    stream: StreamSettings = StreamSettings()
    tracking: TrackingSettings = TrackingSettings()


def known_settings() -> dict[str, Any]:
    """Every setting as dotted name → pydantic field, in order of declaration."""
    found = {}
    for section_name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type)
        for name, field in section.annotation.model_fields.items():
            found[f"{section_name}.{name}"] = field
    return found


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(a) for a in get_args(annotation))
    if get_origin(annotation) in (list, tuple, dict):
        return "LIST" if get_origin(annotation) is not dict else "MAP"
    args = [a for a in get_args(annotation) if a is not type(None)]
    if args:
        return _type_name(args[0])
    return str(getattr(annotation, "__name__", annotation)).upper()


def _as_yaml(value: Any) -> str:
    """A default as one would write it in the YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def describe_settings(first: tuple[str, ...]) -> str:
    """The help text: every setting with its type, unit and default; the sections that a command reads come first."""
    lines = []
    current = ""
    ordered = sorted(known_settings().items(), key=lambda item: item[0].split(".")[0] not in first)
    for dotted, field in ordered:
        section = dotted.split(".")[0]
        if section != current:
            note = "" if section in first else "  (read by other commands, from the same YAML)"
            lines += ["", f"{section}:{note}"]
            current = section
        unit = (field.json_schema_extra or {}).get("unit", "")
        default = field.default
        default = "unset" if default is None or default in ("", [], {}) else _as_yaml(default)
        note = f"default {default}" + (
            f" {unit}" if unit and default != "unset" else f", in {unit}" if unit else ""
        )
        lines.append(f"  --{dotted} {_type_name(field.annotation)}")
        lines.append(f"        {field.description} ({note})")
    return "\n".join(lines)


def unknown_setting(name: str, where: str) -> UserError:
    """The error for a setting, or section, that does not exist: names the nearest one that does."""
    names = list(known_settings())
    near = [] if "." in name else difflib.get_close_matches(name, list(Config.model_fields), n=1, cutoff=0.7)
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:  # the right name in the wrong section, or no section at all
        tail = {n.split(".")[1]: n for n in names}
        near = [tail[t] for t in difflib.get_close_matches(name.split(".")[-1], list(tail), n=1, cutoff=0.5)]
    hint = f"did you mean {near[0]}?" if near else "--help lists every setting"
    return UserError(f"unknown setting {name} in {where}: {hint}")


class _Yaml(yaml.SafeLoader):
    """YAML whose dates stay text: no setting is a date, and a name or a template variable may look like one."""


_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Yaml)
    except FileNotFoundError:
        raise UserError(f"no config file {path}: --config takes a YAML file, configs/ has examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    loaded = loaded or {}
    if not isinstance(loaded, dict):
        raise UserError(
            f"{path}: expected sections of settings (store:, target:, …), found {type(loaded).__name__}"
        )
    known = known_settings()
    for section, values in loaded.items():
        if section not in Config.model_fields:
            raise unknown_setting(str(section), str(path))
        if not isinstance(values, dict):
            raise UserError(f"{path}: section {section} must hold settings, found {values!r}")
        for name in values:
            if f"{section}.{name}" not in known:
                raise unknown_setting(f"{section}.{name}", str(path))
    return loaded


def _parse_value(dotted: str, text: str) -> Any:
    """A command-line value: text stays as typed, a list is a,b,c or [a, b, c], everything else is read as YAML."""
    annotation = known_settings()[dotted].annotation
    options = (annotation,) if get_origin(annotation) in (None, list, tuple, dict) else get_args(annotation)
    if text not in ("null", "~"):
        if str in options:
            return text
        if any(get_origin(option) in (list, tuple) for option in options) and not text.lstrip().startswith("["):
            return text.split(",")  # not through YAML, which reads *.jsonl as an alias
    try:
        value = yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        raise UserError(f"--{dotted}: cannot read {text!r}: {error}") from None
    return text if isinstance(value, str) else value  # YAML reads 1e-4 as text; pydantic turns it into a number


def build(values: dict[str, dict[str, Any]]) -> Config:
    """A Config from nested values; a wrong type or a value out of range is a UserError that names the setting."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
            lines.append(f"{name} = {problem['input']!r}: {problem['msg']}")
        raise UserError("these settings are not valid:\n  " + "\n  ".join(lines)) from None


def command_line(program: str, about: str) -> argparse.ArgumentParser:
    """The parser of a command, which may add arguments of its own before `load` adds --config and --help."""
    return argparse.ArgumentParser(
        prog=program,
        description=about,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def load(
    parser: argparse.ArgumentParser,
    argv: list[str] | None = None,
    *,
    sections: tuple[str, ...] = tuple(Config.model_fields),
) -> tuple[Config, argparse.Namespace]:
    """Read a command line (None: that of this process) into (settings, the other arguments of `parser`).

    parser: from `command_line`. sections: those that the command reads, and --help shows first: one YAML serves
    every phase. Raises UserError for anything unknown or invalid.
    """
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="settings of the run; any can be overridden below"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " [--section.name value …]"
    parser.epilog = "settings:" + describe_settings(sections)
    known_args, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    values = _read_yaml(known_args.config) if known_args.config else {}
    values = {section: dict(entries) for section, entries in values.items()}
    while rest:
        argument = rest.pop(0)
        name, separator, text = argument.partition("=")
        if not name.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}: settings are given as --section.name value")
        dotted = name[2:]
        if dotted not in known_settings():
            raise unknown_setting(dotted, "the command line")
        if not separator:
            if not rest:
                raise UserError(f"--{dotted} needs a value")
            text = rest.pop(0)
        section, setting_name = dotted.split(".")
        values.setdefault(section, {})[setting_name] = _parse_value(dotted, text)
    return build(values), known_args
