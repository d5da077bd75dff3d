"""The options that several verbs share: what model and how it runs, how tokens are chosen, what is printed.

Every flag is spelled and explained here once. Values are checked where they are used (SamplingParams, LLM), so that
the command line and the Python API refuse the same things in the same words; only syntax is checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flexdecode.cli.text import clean
from flexdecode.cli.verb import option

if TYPE_CHECKING:
    from flexdecode.generation.params import SamplingParams
    from flexdecode.llm import LLM

ENGINE = "Model and engine"
SAMPLING = "Choosing tokens"
OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint directory, a .gguf file, a hub id, 'demo', or 'random:SHAPE' (random weights, speed only).",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None, option("--revision", help="Branch, tag or commit of a hub model.", panel=ENGINE, show_default=False)
]
Offline = Annotated[
    bool,
    option("--offline", help="Never ask the network.", panel=ENGINE, also_env="HF_HUB_OFFLINE"),
]
IgnoreConfig = Annotated[
    list[str] | None,
    option(
        "--ignore-config",
        metavar="KEY",
        help="Accept this unknown key of config.json; may be repeated.",
        panel=ENGINE,
        show_default=False,
    ),
]
Dtype = Annotated[str, option("--dtype", help="Compute type: auto, bfloat16, float16 or float32.", panel=ENGINE)]
KvDtype = Annotated[str, option("--kv-dtype", help="Type of cached keys and values.", panel=ENGINE)]
MaxContext = Annotated[
    int | None,
    option(
        "--max-context",
        help="Most tokens, prompt and answer together; the model's own limit by default.",
        panel=ENGINE,
        show_default=False,
    ),
]
Speculate = Annotated[
    str,
    option(
        "--speculate",
        metavar="lookup|MODEL",
        help="Propose tokens and check several at once: from the text itself, or by a smaller model.",
        panel=ENGINE,
    ),
]
Json = Annotated[bool, option("--json", help="Print JSON to stdout.", panel=OUTPUT)]
Verbose = Annotated[bool, option("--verbose", "-v", help="Say on stderr what is used and chosen.", panel=OUTPUT)]


@dataclass(frozen=True)
class EngineOptions:
    """Everything that LLM takes beside the model's name."""

    dtype: Dtype = "auto"
    kv_dtype: KvDtype = "auto"
    device: Annotated[str, option("--device", help="auto, cpu or cuda.", panel=ENGINE)] = "auto"
    attention: Annotated[
        str, option("--attention", help="Attention backend; one that cannot serve is an error.", panel=ENGINE)
    ] = "auto"
    mask: Annotated[
        str | None,
        option(
            "--mask",
            metavar="EXPR|FILE.py:NAME",
            help="Which keys a token sees, beside the model's own mask: 'window(4096) | sinks(4)', or a function.",
            panel=ENGINE,
            show_default=False,
        ),
    ] = None
    replace_mask: Annotated[
        bool, option("--replace-mask", help="Let --mask replace the model's own mask.", panel=ENGINE)
    ] = False
    max_context: MaxContext = None
    kv_memory: Annotated[
        str | None,
        option(
            "--kv-memory",
            metavar="SIZE",
            help="Most memory for the cache, over all sequences: 2GiB, 512MB, 40% (of what the weights leave free).",
            panel=ENGINE,
            show_default=False,
        ),
    ] = None
    ignore_memory: Annotated[
        bool, option("--ignore-memory", help="Load also what does not fit into free memory.", panel=ENGINE)
    ] = False
    batch_invariant: Annotated[
        bool,
        option(
            "--batch-invariant",
            help="Logits have the same bits whatever else is computed beside them; prompts take longer.",
            panel=ENGINE,
        ),
    ] = False
    threads: Annotated[
        int | None,
        option("--threads", help="CPU threads; torch's choice by default.", panel=ENGINE, show_default=False),
    ] = None
    revision: Revision = None
    offline: Offline = False
    ignore_config: IgnoreConfig = None

    @property
    def keys_to_ignore(self) -> tuple[str, ...]:
        return tuple(self.ignore_config or ())

    def load(self, model: str, progress: Callable[[str, int, int], None], speculate: str = "off") -> LLM:
        from flexdecode.llm import LLM

        return LLM(
            model,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            attention=self.attention,
            mask=self.mask,
            replace_mask=self.replace_mask,
            max_context=self.max_context,
            kv_memory=self.kv_memory,
            ignore_memory=self.ignore_memory,
            batch_invariant=self.batch_invariant,
            threads=self.threads,
            revision=self.revision,
            offline=self.offline,
            ignore_config=self.keys_to_ignore,
            speculate=speculate,
            progress=progress,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """The fields of SamplingParams; what is left out comes from the model's generation_config.json."""

    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens",
            "-n",
            help="Most new tokens; until the context is full by default.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        option(
            "--temperature",
            "--temp",
            help="0 always takes the likeliest token. Like the next five, the model's own setting by default.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    top_k: Annotated[
        int | None, option("--top-k", help="Only the K likeliest; 0 is off.", panel=SAMPLING, show_default=False)
    ] = None
    top_p: Annotated[
        float | None,
        option(
            "--top-p",
            help="Only the fewest tokens that together have probability P.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        option(
            "--min-p",
            help="Only tokens at least this share as likely as the likeliest.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        option(
            "--repetition-penalty",
            help="Divides the logits of tokens seen before; 1 is off.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    presence_penalty: Annotated[
        float, option("--presence-penalty", help="Subtracted once from a token already generated.", panel=SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, option("--frequency-penalty", help="Subtracted for each time it was generated.", panel=SAMPLING)
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(
            "--logit-bias",
            metavar="ID:VALUE",
            help="Added to a token's logit; -100 bans it. May be repeated.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int | None, option("--seed", help="Makes the draws repeatable.", panel=SAMPLING, show_default=False)
    ] = None
    stop: Annotated[
        list[str] | None,
        option(
            "--stop",
            metavar="TEXT",
            help="End the answer before this text. May be repeated; the variable holds words.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        option(
            "--stop-token-id",
            metavar="ID",
            help="End the answer at this token. May be repeated.",
            panel=SAMPLING,
            show_default=False,
        ),
    ] = None
    ignore_eos: Annotated[
        bool, option("--ignore-eos", help="Go on past the model's end of sequence.", panel=SAMPLING)
    ] = False

    def params(self, logprobs: int | None = None) -> SamplingParams:
        from flexdecode.generation.params import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias or ()),
            seed=self.seed,
            stop=tuple(clean(text, "--stop") for text in self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


def parse_logit_bias(items: list[str] | tuple[str, ...]) -> dict[int, float]:
    """{token id: bias} from ID:VALUE items; a usage error names the item that is not one."""
    bias: dict[int, float] = {}
    for item in items:
        token_id, _, value = item.partition(":")
        try:
            key, number = int(token_id), float(value)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias {item!r} is not ID:VALUE, such as 50256:-100") from None
        if key in bias:
            raise typer.BadParameter(f"--logit-bias names token {key} twice")
        bias[key] = number
    return bias
