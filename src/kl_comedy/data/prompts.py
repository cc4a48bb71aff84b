"""Problems to prompts (plain text or the model's chat template, then token ids), and the order of prompts.

Nothing in a problem is interpreted: ``{text}`` is replaced literally, and the template gets the text as a value. A
problem whose text contains a control token of the tokenizer (``<|im_end|>``) would change the structure of the
conversation; it is left out and counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.config.schema import PromptConfig
from kl_comedy.errors import RunFailed, UserError, bad_value, shown
from kl_comedy.records import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEMPLATE_SECONDS = 2.0
"""CPU seconds a chat template may take for one prompt; real ones take less than a millisecond."""
TEMPLATE_SECONDS_EACH = 0.02
"""CPU seconds that each prompt of a data set adds to the limit of all prompts together."""
TEMPLATE_BYTES = 2**29
"""Memory that a template may take beside the process's own."""
TEMPLATE_CHARACTERS = 1_000_000
"""The most characters of a prompt; each character of the conversation allows ten more."""

TOKENIZED_AT_ONCE = 1_000_000
"""Characters of the texts that are tokenized together: the tokenizers library takes some hundred bytes for each until
all are done."""


class PromptOrder:
    """Batches of item indices over endless shuffled epochs; ``indices(i)`` depends on the arguments and ``i`` only.

    The batches laid end to end are whole epochs, each a permutation of all items; a batch that straddles two epochs
    holds no item twice, provided ``n_items >= batch``. An epoch is a seeded shuffle; items that the straddling batch
    already holds are swapped out of its first positions, each with the next free item behind them. With
    ``n_items >= 2 * batch`` these swaps never touch the last ``batch`` positions, so any epoch is computed from the
    plain shuffle of the one before. Below, epochs are computed one after the other from the last cached one.
    """

    def __init__(self, n_items: int, batch: int, seed: int) -> None:
        if n_items < 1 or batch < 1:
            raise UserError(f"PromptOrder: needs at least one item and one prompt per batch, got {n_items} and {batch}")
        self.n_items = n_items
        self.batch = batch
        self.seed = seed
        self._epochs: dict[int, list[int]] = {}

    def indices(self, i: int) -> list[int]:
        """The item indices of batch ``i`` (counted from 0), ``batch`` of them."""
        if i < 0:
            raise ValueError(f"batches are counted from 0, got {i}")
        return [self.item(position) for position in range(i * self.batch, (i + 1) * self.batch)]

    def item(self, position: int) -> int:
        """The item at ``position`` of the batches laid end to end."""
        epoch, offset = divmod(position, self.n_items)
        return self._epoch(epoch)[offset]

    def _epoch(self, epoch: int) -> list[int]:
        """The permutation of ``epoch``; the last two are cached."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        if self._depends_on_all_before:
            cached_before = [cached for cached in self._epochs if cached < epoch]
            first = max(cached_before, default=-1) + 1
        else:
            first = epoch
        for current in range(first, epoch + 1):
            order = self._join(current)
            # The one before is kept: a batch that straddles two epochs asks for both.
            previous = {cached: old for cached, old in self._epochs.items() if cached == current - 1}
            self._epochs = {**previous, current: order}
        return self._epochs[epoch]

    @property
    def _depends_on_all_before(self) -> bool:
        """Whether swaps at an epoch's start may reach its last ``batch`` positions, and so the next epoch."""
        return self.n_items < 2 * self.batch

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.n_items))
        # The text is the seed: changing it changes the order of every stored run's data.
        random.Random(f"order:{self.seed}:{epoch}").shuffle(order)
        return order

    def _join(self, epoch: int) -> list[int]:
        """``epoch``'s shuffle with the straddling batch's items swapped out of its first positions."""
        order = self._shuffled(epoch)
        # Items at the start of the batch that straddles the boundary, which come from the epoch before.
        shared = epoch * self.n_items % self.batch
        if shared == 0 or self.n_items < self.batch:
            return order
        if self._depends_on_all_before:
            before = self._epochs[epoch - 1]
        else:
            before = self._shuffled(epoch - 1)
        in_batch = set(before[self.n_items - shared :])
        head = self.batch - shared
        free = (position for position in range(head, self.n_items) if order[position] not in in_batch)
        for position in range(head):
            if order[position] in in_batch:
                other = next(free)
                order[position], order[other] = order[other], order[position]
        return order


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderReport:
    """Counts of problems: rendered, left out as too long, and left out because they spell a control token."""

    rendered: int
    too_long: int
    control_tokens: int


def render(
    problems: Sequence[Problem], config: PromptConfig, tokenizer: PreTrainedTokenizerBase, *, key: str = "data.prompt"
) -> tuple[list[Prompt], RenderReport]:
    """Render and tokenize every problem; keep those of at most ``config.max_tokens`` tokens, in order.

    plain: ``prefix + text + suffix + prefill`` after the tokenizer's special tokens. chat: the template's generation
    prompt for ``system`` and the user's turn ``prefix + text + suffix``, then ``prefill``; no special tokens are added.

    Raises :class:`UserError` for chat without a chat template, for settings the template refuses or plain text
    cannot carry, for a prompt without tokens, and when no problem is left.
    """
    control = [token for token in tokenizer.all_special_tokens if token]
    safe = [problem for problem in problems if not any(token in problem.text for token in control)]
    texts = _texts(safe, config, tokenizer, key=key)
    token_lists = _tokenize(texts, tokenizer, special=config.template == "plain", key=key)
    prompts = []
    lengths = []
    for problem, text, token_ids in zip(safe, texts, token_lists, strict=True):
        lengths.append(len(token_ids))
        if not token_ids:
            # A model cannot begin from nothing: the first token's log-prob needs a position before it.
            raise UserError(f"{key}: the problem {problem.id!r} becomes a prompt without any token: {shown(text)}")
        if len(token_ids) <= config.max_tokens:
            prompts.append(Prompt(problem=problem, text=text, token_ids=token_ids))
    if not prompts:
        shortest = min(lengths, default=0)
        raise UserError(
            f"{key}.max_tokens: got {config.max_tokens}; none of the {len(problems)} problems is left: "
            f"{len(safe)} are too long (the shortest has {shortest} tokens), "
            f"{len(problems) - len(safe)} spell a control token"
        )
    return prompts, RenderReport(
        rendered=len(prompts),
        too_long=len(safe) - len(prompts),
        control_tokens=len(problems) - len(safe),
    )


def _texts(
    problems: Sequence[Problem], config: PromptConfig, tokenizer: PreTrainedTokenizerBase, *, key: str
) -> list[str]:
    """The text of each problem's prompt, by the template that ``config`` names. Raises as :func:`render`."""
    turns = [config.prefix + problem.text + config.suffix for problem in problems]
    if config.template == "chat":
        turns = _chat(turns, config, tokenizer, key=key)
    elif config.template != "plain":
        raise bad_value(f"{key}.template", config.template, ["plain", "chat"])
    elif config.system is not None:
        raise UserError(f"{key}.system: plain text has no system turn; use {key}.prefix, or {key}.template=chat")
    texts = []
    for problem, turn in zip(problems, turns, strict=True):
        texts.append(turn + config.prefill.replace("{text}", problem.text))
    return texts


def continuation_ids(
    prompt: Prompt, continuation: str, tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> tuple[int, ...]:
    """The tokens that ``continuation`` adds to ``prompt`` when both are tokenized together; at least one.

    ``special``: whether the prompt was tokenized with the tokenizer's special tokens in front (plain) or not (chat).
    Raises :class:`UserError` where it adds none, or where the tokenizer joins its beginning with the prompt's end.
    """
    # Together, because a tokenizer may write " B" after a space and "B" after a bracket as different tokens.
    (whole,) = _tokenize([prompt.text + continuation], tokenizer, special=special, key="the choices")
    size = len(prompt.token_ids)
    joined_with_prompt = whole[:size] != prompt.token_ids
    if joined_with_prompt or len(whole) == size:
        raise UserError(
            f"problem {prompt.problem.id!r}: the tokenizer has no separate tokens for {shown(continuation)} after "
            f"{prompt.text[-20:]!r}; end the prompt elsewhere (suffix, prefill), or ask for a generated answer"
        )
    return whole[size:]


def _chat(texts: Sequence[str], config: PromptConfig, tokenizer: PreTrainedTokenizerBase, *, key: str) -> list[str]:
    """The template's text up to the answer, with each text as the user's turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{key}.template: got 'chat', but the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat "
            f"template; use {key}.template=plain"
        )
    conversations = []
    for text in texts:
        conversations.append(_first_turns(text, config))
    try:
        return _rendered(tokenizer, conversations)
    except TemplateFault as error:
        raise UserError(f"{key}: the chat template refuses the conversation: {error}") from None


def _first_turns(text: str, config: PromptConfig) -> Conversation:
    """What stands before the policy's first turn."""
    turns = [{"role": "user", "content": text}]
    if config.system is not None:
        turns.insert(0, {"role": "system", "content": config.system})
    return turns


def _rendered(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]) -> list[str]:
    """The prompt of each conversation. Raises :class:`TemplateFault`."""
    if not hasattr(os, "fork"):
        # Windows: no child to limit.
        return [_render_chat(tokenizer, conversation) for conversation in conversations]
    return _render_in_child(tokenizer, conversations)


def turn_frame(config: PromptConfig, tokenizer: PreTrainedTokenizerBase, *, role: str) -> tuple[str, str] | None:
    """The text before and after what somebody in ``role`` says between two turns of the policy. Empty for plain text.

    None for a chat template that renders earlier turns anew: it writes no text between turns, but a prompt for each.
    Raises :class:`UserError` for a template that refuses such a turn.
    """
    if config.template == "plain":
        return "", ""
    key = "data.prompt"
    said = {"role": "user", "content": _SAID}
    answered = {"role": "assistant", "content": _ANSWERED}
    observed = {"role": role, "content": _OBSERVED}
    try:
        first, whole = _render_in_child(tokenizer, [[said], [said, answered, observed]])
    except TemplateFault as error:
        raise UserError(f"{key}: the chat template refuses a turn of environment.role {role!r}: {error}") from None
    before, found, after = whole.removeprefix(first + _ANSWERED).partition(_OBSERVED)
    keeps_turns = whole.startswith(first + _ANSWERED)
    if not keeps_turns or not found:
        return None
    return before, after


class TurnRenderer:
    """Renders dialogues for the policy's next turn, by a chat template that writes earlier turns anew."""

    def __init__(self, config: PromptConfig, tokenizer: PreTrainedTokenizerBase, *, role: str) -> None:
        """Raises :class:`UserError` for a prefill: it is a part of the policy's turns, which the template moves."""
        if config.prefill:
            raise UserError("data.prompt.prefill: a template that renders earlier turns anew has no place for it")
        self._config = config
        self._tokenizer = tokenizer
        self._role = role
        self._control = [token for token in tokenizer.all_special_tokens if token]

    def control_token(self, text: str) -> str | None:
        """The first special token that ``text`` spells: rendered, it would be that token."""
        return next((token for token in self._control if token in text), None)

    def prompts(self, dialogues: Sequence[tuple[Problem, Sequence[tuple[str, str]]]]) -> list[tuple[int, ...]]:
        """The ids that the next turn of each dialogue is drawn from, by its turns and what each was answered.

        Raises :class:`RunFailed` where the template fails, and :class:`UserError` where the tokenizer does.
        """
        conversations = []
        for problem, exchanges in dialogues:
            turns = _first_turns(self._config.prefix + problem.text + self._config.suffix, self._config)
            for said, answer in exchanges:
                turns.append({"role": "assistant", "content": said})
                turns.append({"role": self._role, "content": answer})
            conversations.append(turns)
        try:
            texts = _rendered(self._tokenizer, conversations)
        except TemplateFault as error:
            raise RunFailed(f"the chat template refuses a dialogue: {error}") from None
        return list(_tokenize(texts, self._tokenizer, special=False, key="data.prompt"))


_SAID, _ANSWERED, _OBSERVED = "What is 1+1?", "It is 2.", "Observed 3."
"""Turns of which a template shows what it writes around each."""


Conversation = list[dict[str, str]]
"""Turns of ``role`` and ``content``."""


class TemplateFault(Exception):
    """Says in one line what a chat template did instead of giving a prompt."""


def _render_chat(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def _render_in_child(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]) -> list[str]:
    """The prompt of each conversation, rendered by a child process with limits of time and memory.

    A template is a program from the model's folder. Its sandbox keeps it from files and from Python's internals, but
    not from endless loops or texts of gigabytes, and these may depend on the conversation, so that a trial with one
    says nothing about the next. The child is a fork, because the template needs the tokenizer; it uses neither torch
    nor the tokenizer's library, whose threads it does not have. Raises :class:`TemplateFault`.
    """
    import warnings

    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _render_limited(tokenizer, conversations, writing)
        finally:
            # Whatever happens, the child must not return into the caller's code.
            os._exit(0)
    # While this process holds the writing end too, the loop below would wait for a line after the child's end.
    os.close(writing)
    try:
        texts = _read_texts(reading)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if len(texts) == len(conversations):
        return texts

    number = 0
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
    if number in (signal.SIGPROF, signal.SIGXCPU):
        raise TemplateFault(f"it takes more than {TEMPLATE_SECONDS:g} s of CPU time")
    raise TemplateFault(f"the process that renders it ended (signal {number})")


def _read_texts(reading: int) -> list[str]:
    """The prompts that the child has written, up to its end. Raises :class:`TemplateFault` for the first fault."""
    texts: list[str] = []
    with open(reading, encoding="ascii") as lines:
        for line in lines:
            if not line.endswith("\n"):
                # The process ended while it wrote.
                break
            reply = json.loads(line)
            if "fault" in reply:
                raise TemplateFault(reply["fault"])
            texts.append(reply["text"])
    return texts


def _render_limited(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], writing: int) -> None:
    """Write a line of JSON for each conversation; the kernel ends the process where it takes too long."""
    import resource

    # A handler of the trainer's (SLURM's requeue, say) would catch what must end this process.
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    seconds = 1 + int(TEMPLATE_SECONDS + len(conversations) * TEMPLATE_SECONDS_EACH)
    _lower_limit(resource.RLIMIT_CPU, seconds)
    # Wall time, against a lock that another thread held at the fork: nobody in this process will release it.
    signal.setitimer(signal.ITIMER_REAL, 60.0 + 20 * seconds)
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + TEMPLATE_BYTES)
    with open(writing, "w", encoding="ascii") as lines:
        for conversation in conversations:
            # The clock of one prompt; RLIMIT_CPU is that of all.
            signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
            lines.write(json.dumps(_reply(tokenizer, conversation)) + "\n")


def _reply(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> dict[str, str]:
    """The prompt of a conversation as ``text``, or the reason for none as ``fault``."""
    allowed = TEMPLATE_CHARACTERS + 10 * sum(len(turn["content"]) for turn in conversation)
    try:
        text = _render_chat(tokenizer, conversation)
    except MemoryError:
        return {"fault": f"it takes more than {TEMPLATE_BYTES >> 20} MiB"}
    except RecursionError:
        return {"fault": "it calls itself without end"}
    except Exception as error:
        # The template's own, or one of Python's functions that it calls.
        first_line = str(error).partition("\n")[0][:300]
        return {"fault": first_line or type(error).__name__}
    if len(text) > allowed:
        return {"fault": f"it writes more than {allowed:,} characters"}
    return {"text": text}


def _lower_limit(kind: int, amount: int) -> None:
    """Set the soft limit of this process to ``amount``, or to its hard limit where that is lower."""
    import resource

    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(kind, (amount, hard))


def _tokenize(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, special: bool, key: str
) -> Iterator[tuple[int, ...]]:
    """Token ids per text; no padding, no truncation, no end token added, no doubled first token."""
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    for part in _parts(texts):
        try:
            encoded = tokenizer(
                part, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False
            )["input_ids"]
        except Exception as error:
            # The tokenizers library raises nothing more specific.
            raise UserError(
                f"{key}: the model's tokenizer cannot encode these prompts, for example {shown(part[0])} ({error}); "
                "check prefix, suffix, prefill and the problems' characters"
            ) from error
        for text, ids in zip(part, encoded, strict=True):
            # Some tokenizers (T5's) end every text with the end token, after which a model writes nothing.
            ends_with_eos = special and eos is not None and ids[-1:] == [eos]
            if ends_with_eos and not text.endswith(tokenizer.eos_token):
                ids = ids[:-1]
            # A prefix may spell the first token that the tokenizer adds as well.
            if bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]
            yield tuple(ids)


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """``texts`` in order, in lists of at most :data:`TOKENIZED_AT_ONCE` characters, or of one text that is longer."""
    part: list[str] = []
    characters = 0
    for text in texts:
        if part and characters + len(text) > TOKENIZED_AT_ONCE:
            yield part
            part = []
            characters = 0
        part.append(text)
        characters += len(text)
    if part:
        yield part
