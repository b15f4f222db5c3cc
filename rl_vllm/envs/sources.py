"""Prompts from wherever they are: lists, datasets, files, generators; one sequence that a run can resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rl_vllm.config import require_at_least
from rl_vllm.envs.episode import Message
from rl_vllm.envs.prompts import Entry, PromptSet, endless_order
from rl_vllm.envs.reward import shorten
from rl_vllm.errors import BadInputError, ConfigError


@runtime_checkable
class IndexedRows(Sized, Protocol):
    """Rows by number: a list, a tuple, a ``datasets.Dataset``."""

    def __getitem__(self, index: int) -> Any:
        """The row of a number from 0 on."""
        ...


# What a prompt source reads; ``PromptSource`` says what each is.
PromptData: TypeAlias = "PromptSet | IndexedRows | Iterable[Any] | Callable[[], Iterator[Any]] | str | Path"


class PromptSource:
    """Prompts as one sequence of entries, pass after pass.

    A row is a text; a mapping with ``messages`` (a chat), ``prompt`` (a text or a chat) or ``question`` (a text), of
    which the first that is there and not None is what the model sees; or a chat, that is a list of messages, as chat
    templates read them. An entry is the row's mapping, with whatever else it holds for the rewards; its ``question`` is
    always text (of a chat without one: the last thing the user says), and ``messages`` is there when the model sees
    more or something else than that.

    Args:
        data: A list, tuple or other rows by number, such as a Hugging Face ``Dataset``; a path to a ``.jsonl`` file, a
            row per line; a :class:`PromptSet`, with its examples and system prompt; an iterable or a callable that
            gives a fresh iterator for each pass; or an iterator, for one pass. Lists and files are checked whole at
            once, everything else row by row when it is read.
        seed: Shuffles each pass differently, and alike in every run; None keeps the data's order. Needs data of a known
            length.
        epochs: Passes over the data; None goes on for ever, or as long as an iterator lasts.

    Raises:
        BadInputError: There are no rows; a row has no text to ask, or the wrong type; a line is not JSON. Names the
            position or line, and the value. What is read later raises it then.
        ConfigError: A seed for data without a length, several passes over an iterator, or a number out of range.
    """

    def __init__(self, data: PromptData, *, seed: int | None = None, epochs: int | None = 1) -> None:
        if seed is not None:
            require_at_least("seed", seed, 0)
        if epochs is not None:
            require_at_least("epochs", epochs, 1)
        self._seed = seed
        self._epochs = epochs
        self._rows: _Rows | None = None
        self._restart: Callable[[], Iterator[Any]] | None = None
        self._once: Iterator[Any] | None = None
        # How far a one-pass iterator has been read.
        self._num_taken = 0
        self._choose(data)
        if self._rows is None and seed is not None:
            raise ConfigError(f"seed={seed} needs data of a known length to shuffle: give a list, or shuffle it before")
        if self._once is not None and epochs is not None and epochs > 1:
            raise ConfigError(f"epochs={epochs}, but an iterator has one pass: give a callable that returns a new one")

    @property
    def num_entries(self) -> int | None:
        """Entries per pass, or None when the data has no length."""
        return None if self._rows is None else len(self._rows)

    def entries(self, start: int = 0) -> Iterator[Entry]:
        """The sequence from position ``start`` on: a run that stopped after k entries goes on with ``start=k``.

        Data without a length is read and dropped up to there. An iterator goes on from where it is.

        Raises:
            ConfigError: ``start`` is negative, or an iterator is past it already.
            BadInputError: While iterating: see the class.
        """
        require_at_least("start", start, 0)
        if self._rows is not None:
            return self._numbered(self._rows, start)
        if self._once is None:
            return islice(self._repeated(), start, None)
        if start < self._num_taken:
            raise ConfigError(
                f"start={start}, but {self._num_taken} rows of the iterator have been read: give a callable that "
                "returns a new one"
            )
        return islice(self._rest(self._once), start - self._num_taken, None)

    def _choose(self, data: PromptData) -> None:
        """Decide how the data is read; the order matters, as types overlap."""
        if isinstance(data, PromptSet):
            chats = ({**entry, "messages": data.chat(index)} for index, entry in enumerate(data.entries))
            self._rows = _Rows(tuple(chats), check=True)
        elif isinstance(data, str | Path):
            self._rows = _Rows(_JsonLines(data), check=True)
        elif isinstance(data, Mapping):
            keys = shorten(", ".join(str(key) for key in data))
            raise BadInputError(f"the data is a mapping of {keys}: choose one split, or put a single row into a list")
        elif isinstance(data, set | frozenset):
            raise BadInputError("the data is a set, which has no order to resume in: give sorted(data)")
        elif isinstance(data, IndexedRows):
            self._rows = _Rows(data, check=isinstance(data, list | tuple))
        elif isinstance(data, Iterator):
            self._once = data
        elif isinstance(data, Iterable):
            self._restart = data.__iter__
        elif callable(data):
            self._restart = data
        else:
            raise BadInputError(
                f"the data is {shorten(str(data))} ({type(data).__name__}): give a list, a dataset, a .jsonl path, a "
                "callable that returns an iterator, or an iterator"
            )

    def _numbered(self, rows: _Rows, start: int) -> Iterator[Entry]:
        left = None if self._epochs is None else max(0, self._epochs * len(rows) - start)
        for index in islice(endless_order(len(rows), seed=self._seed, start=start), left):
            yield rows.entry(index)

    def _repeated(self) -> Iterator[Entry]:
        assert self._restart is not None
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            num_rows = 0
            for row in self._restart():
                yield _entry(row, f"row {num_rows}")
                num_rows += 1
            if num_rows == 0:
                raise BadInputError(f"pass {epoch} over the data has no rows: return a fresh iterator each time")
            epoch += 1

    def _rest(self, iterator: Iterator[Any]) -> Iterator[Entry]:
        for row in iterator:
            self._num_taken += 1
            yield _entry(row, f"row {self._num_taken - 1}")
        if self._num_taken == 0:
            raise BadInputError("the data is empty: an iterator needs at least one row")


def as_source(data: PromptSource | PromptData) -> PromptSource:
    """A source as it is; anything else as one pass in its own order: see :class:`PromptSource`."""
    return data if isinstance(data, PromptSource) else PromptSource(data)


def first_messages(entry: Entry, system_prompt: str | None = None) -> list[Message]:
    """The chat that a rollout starts from, for an entry of a source.

    Args:
        entry: As :meth:`PromptSource.entries` gives it.
        system_prompt: Goes first, unless the chat begins with a system message of its own.
    """
    messages = list(entry.get("messages") or [{"role": "user", "content": entry["question"]}])
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


class _Rows:
    """Rows with numbers, as entries."""

    def __init__(self, rows: IndexedRows, *, check: bool) -> None:
        self._rows = rows
        if len(rows) == 0:
            raise BadInputError("the data is empty: a prompt source needs at least one row")
        if check:
            for index in range(len(rows)):
                self.entry(index)

    def __len__(self) -> int:
        return len(self._rows)

    def entry(self, index: int) -> Entry:
        where = self._rows.where(index) if isinstance(self._rows, _JsonLines) else f"row {index}"
        return _entry(self._rows[index], where)


class _JsonLines:
    """The lines of a file that are not blank; only where they begin is kept in memory."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).expanduser()
        if self._path.suffix != ".jsonl" or not self._path.is_file():
            raise BadInputError(
                f"no .jsonl file at {shorten(str(path), 200)}: a text is read as a path; put a single prompt into a "
                "list"
            )
        self._lines: list[tuple[int, int]] = []
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._lines.append((number, offset))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Any:
        with self._path.open("rb") as file:
            file.seek(self._lines[index][1])
            line = file.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            shown = shorten(line.decode(errors="replace"))
            raise BadInputError(f"{self.where(index)} is not JSON ({error}): {shown}") from error

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index][0]},"


def _entry(row: Any, where: str) -> Entry:
    """A row in the form that the class documents."""
    if isinstance(row, str):
        return {"question": _text(row, "text", where)}
    if isinstance(row, list | tuple):
        return {"question": _asked(row, "messages", where), "messages": row}
    if not isinstance(row, Mapping):
        raise BadInputError(
            f"{where} of the data is {shorten(str(row))} ({type(row).__name__}): give a text, a list of messages, or a "
            "mapping with question, prompt or messages"
        )
    field = next((name for name in ("messages", "prompt", "question") if row.get(name) is not None), None)
    if field is None:
        keys = ", ".join(str(key) for key in row)
        raise BadInputError(
            f"{where} of the data has the keys {keys or '(none)'}, but none of question, prompt and messages: rename "
            "the one that is asked"
        )
    value = row[field]
    if field == "question":
        return {**row, "question": _text(value, field, where)}
    if isinstance(value, str) and field == "prompt":
        asked = _text(value, field, where)
        value = [{"role": "user", "content": value}]
    else:
        asked = _asked(value, field, where)
    own = row.get("question")
    return {**row, "question": own if isinstance(own, str) and own.strip() else asked, "messages": value}


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{where} of the data has {field}={value!r}: it must be text that is not empty")
    return value


def _asked(chat: Any, field: str, where: str) -> str:
    """What the user says last, after a check that chat templates can read the chat and that the model is next."""
    if not isinstance(chat, Sequence) or isinstance(chat, str) or not chat:
        raise BadInputError(f"{where} of the data has {field}={chat!r}: it must be a list of messages, at least one")
    for number, message in enumerate(chat):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            shown = shorten(str(message))
            raise BadInputError(f'{where} of the data has {shown} as message {number}: it needs a text as "role"')
    if chat[-1]["role"] == "assistant":
        raise BadInputError(
            f"{where} of the data ends with the assistant's {shorten(str(chat[-1].get('content')))}: the model answers "
            "next, so leave that message out"
        )
    asking = next((message for message in reversed(chat) if message["role"] == "user"), chat[-1])
    return _text(_content_text(asking.get("content")), f"{field}[...].content", where)


def _content_text(content: Any) -> Any:
    """Text as it is; of a list of parts, those that are text."""
    if not isinstance(content, list | tuple):
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))
