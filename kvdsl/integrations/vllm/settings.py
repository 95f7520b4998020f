"""The policy that serves, and its params: `additional_config["kvdsl"]` of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvdsl.budget import is_number, with_ratio
from kvdsl.errors import KvdslError
from kvdsl.generation.spans import THINK
from kvdsl.memory import OPTIONS
from kvdsl.runtime.given import param
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState

if TYPE_CHECKING:
    from kvdsl.passes.answers import Answers


@dataclass(frozen=True)
class Settings:
    """A policy, and what its params are set to.

    Attributes:
        policy: a shipped policy's name, or a .kv file.
        given: params and their values, by name; the others have their defaults.
        storage, rope, kv_dtype: as a cache's constructor takes them.
        thinks: what the model writes around its thinking.
    """

    policy: str
    given: tuple[tuple[str, float], ...]
    storage: str | None = None
    rope: str | None = None
    kv_dtype: str | None = None
    thinks: tuple[str, str] = THINK

    @property
    def spec(self) -> PolicySpec:
        """The policy, compiled.

        Raises:
            KvdslError: if there is no such policy, or if it cannot lie in memory so.
        """
        return _spec(self.policy, self.storage, self.rope, self.kv_dtype)

    @property
    def answers(self) -> bool:
        """Whether requests share prompts and the policy is the answers': where its budget is `prompt` and some tokens.

        Raises:
            KvdslError: if the budget is, and the policy cannot be served so.
        """
        return _answers(self.policy) is not None

    def state(self, layer: int, layers: int, head_offset: int = 0) -> SlotState:
        """An empty state of one layer of a request.

        Args:
            head_offset: the first KV head's number in the whole layer.

        Raises:
            KvdslError: if a param is none of the policy's, or no number that it may be.
        """
        spec = self.spec
        named = with_ratio(dict(self.given), spec.params, spec.name)
        unknown = [name for name in named if name not in spec.params]
        if unknown:
            raise KvdslError(f"{spec.name} has no param `{unknown[0]}`; it has {', '.join(spec.params) or 'none'}")
        given = dict.fromkeys(spec.params) | {name: param(spec.name, name, value) for name, value in named.items()}
        answers = _answers(self.policy)
        if answers is not None:
            if "turns" in spec.numbers:
                raise KvdslError(
                    f"{spec.name} reads `turns`, which differ between requests that share a prompt: serve it with a budget in tokens"
                )
            with _refused(self.policy):
                answers.check_room({name: float(value) for name, value in named.items()}, layer, layers)
        return slot_state(spec, given, layer=layer, layers=layers, head_offset=head_offset)


@lru_cache
def _spec(policy: str, storage: str | None, rope: str | None, kv_dtype: str | None) -> PolicySpec:
    from kvdsl.loading import load

    answers = _answers(policy)
    spec: PolicySpec
    if answers is None:
        spec = load(policy, storage=storage, rope=rope, kv_dtype=kv_dtype).spec
    else:
        from kvdsl.ir.printer import print_policy
        from kvdsl.loading import class_of

        spec = class_of(answers.policy, print_policy(answers.policy)).spec.laid_out(storage, rope, kv_dtype)
        if spec.kv_dtype != "model":
            raise KvdslError(
                f"{spec.name} keeps prompts in vLLM's own blocks, in the model's dtype: leave `kv_dtype` out, or serve a policy with a "
                f"budget in tokens (h2o, roco), whose pages may have it"
            )
    return spec


@lru_cache
def _answers(policy: str) -> Answers | None:
    """The policy of the answers, for one that counts its budget from the prompt on.

    Raises:
        KvdslError: if such a policy reads the prompt's tokens, or evicts them.
    """
    from kvdsl.compiler import compile_file
    from kvdsl.passes.answers import counts_from_the_prompt, of_answers

    found = compile_file(policy).policy
    if not counts_from_the_prompt(found):
        return None
    with _refused(policy):
        return of_answers(found)


@contextmanager
def _refused(policy: str) -> Iterator[None]:
    """Name the line that rules out serving a policy over shared prompts."""
    from kvdsl.compiler import find_policy
    from kvdsl.lower.without import statement
    from kvdsl.passes.answers import NotByItselfError
    from kvdsl.shipped import policy_name, text_of

    try:
        yield
    except NotByItselfError as error:
        text = text_of(find_policy(policy))
        place = statement(error.what, text)
        line = "" if place is None else f"line {place[0]}: "
        raise KvdslError(
            f"{policy_name(text) or policy} is not served over prompts that requests share: {line}{error.what}; {error.mend}"
        ) from error


def asked(config: Any) -> Settings | None:
    """The `kvdsl` entry of a `VllmConfig`; None without one.

    Raises:
        KvdslError: if it cannot be understood.
    """
    found = None if config is None else (config.additional_config or {}).get("kvdsl")
    return None if found is None else parsed(found)


def traced(config: Any) -> str | None:
    """The file for a trace in a `VllmConfig`; None without one."""
    found = (config.additional_config or {}).get("kvdsl_trace")
    return None if found is None else str(found)


def parsed(found: Any) -> Settings:
    """Settings from `{"policy": "h2o", "budget": 1024}`.

    Raises:
        KvdslError: naming what is wrong.
    """
    example = '{"kvdsl": {"policy": "h2o", "budget": 1024}}'
    if not isinstance(found, Mapping) or not isinstance(found.get("policy"), str):
        raise KvdslError(
            f"vLLM's additional_config says `kvdsl`: {found!r}, which names no policy; give for example {example}"
        )
    thinks = found.get("thinks", THINK)
    if not isinstance(thinks, list | tuple) or len(thinks) != 2 or not all(isinstance(one, str) and one for one in thinks):
        raise KvdslError(f"`thinks` is {thinks!r}; give what the model writes before and behind its thinking, {list(THINK)}")
    rest = {name: value for name, value in found.items() if name not in ("policy", *OPTIONS, "thinks")}
    for name, value in rest.items():
        if not is_number(value):
            raise KvdslError(
                f"vLLM's additional_config sets `{name}` of {found['policy']} to {value!r}; params are numbers: {example}"
            )
    given = tuple(sorted((name, value) for name, value in rest.items()))
    memory = {name: found.get(name) for name in OPTIONS}
    return Settings(found["policy"], given, **memory, thinks=(thinks[0], thinks[1]))


@dataclass(frozen=True)
class Plan:
    """What serves an engine's layers.

    Attributes:
        settings: the policy's.
        layers: of the model.
        whole: whether a step has room for any prompt, so that prompts come whole.
        longest: tokens of the longest text.
        windowed: whether every layer has a sliding window of its own.
    """

    settings: Settings
    layers: int
    whole: bool
    longest: int
    windowed: bool

    @classmethod
    def of(cls, config: Any) -> Plan | None:
        """That of a `VllmConfig`; None without a `kvdsl` entry."""
        settings = asked(config)
        if settings is None:
            return None
        longest = config.model_config.max_model_len
        whole = config.scheduler_config.max_num_batched_tokens >= longest
        text = config.model_config.hf_text_config
        kinds = getattr(text, "layer_types", None)
        windowed = "full_attention" not in kinds if kinds else config.cache_config.sliding_window is not None
        return cls(settings, text.num_hidden_layers, bool(whole), longest, windowed)

    def layer(self, window: int | None) -> Settings:
        """The settings of a layer whose queries see the last `window` tokens, or the whole text.

        As in transformers, the policy serves the layers that see the whole text, or all layers where none does. Any other layer keeps its
        window in the model's dtype. A window is a policy as well: tokens behind it are never seen again.
        """
        if window is None or self.windowed:
            return self.settings
        return Settings("window", (("budget", min(window, self.longest)),))
