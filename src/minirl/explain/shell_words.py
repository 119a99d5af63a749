"""The words of a shell script, read as text: variables that the script itself sets are filled in, no more.

in: the text of a script -> out: [(word, whether a command line it is on has begun)].
simplified: no command substitution, no arithmetic, no environment: what needs them keeps its "$".
verl: none
"""

import re
from collections.abc import Iterator

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(?::?[-=](.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_COMMAND = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|ray|verl)")


def shell_words(text: str) -> Iterator[tuple[str, bool]]:
    """Words in order, without comments and quotes; `NAME=value` outside a command fills later words."""
    reader = _Reader(text)
    in_command = False
    while (word := reader.next()) is not None:
        if word == "\n":
            in_command = False
            continue
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment and not in_command:
            reader.variables[assignment[1]] = assignment[2]
        in_command = in_command or bool(_COMMAND.fullmatch(word))
        yield word, in_command


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n").replace("\\\n", " ")
        self.at = 0
        self.variables: dict[str, str] = {}

    def next(self) -> str | None:
        """The next word, "\\n" where a command ends, None at the end."""
        text = self.text
        while self.at < len(text) and text[self.at] in " \t":
            self.at += 1
        if self.at < len(text) and text[self.at] == "#":
            self.at = self._until("\n")
        if self.at >= len(text):
            return None
        if text[self.at] in "\n;&|()":
            self.at += 1
            return "\n"
        parts = []
        while self.at < len(text) and text[self.at] not in " \t\n;&|()":
            parts.append(self._part())
        return "".join(parts)

    def _part(self) -> str:
        char = self.text[self.at]
        if char == "'":
            end = self._until("'", self.at + 1)
            part = self.text[self.at + 1 : end]
            self.at = end + 1
            return part
        if char == '"':
            self.at += 1
            parts = []
            while self.at < len(self.text) and self.text[self.at] != '"':
                parts.append(self._plain())
            self.at += 1
            return "".join(parts)
        return self._plain()

    def _plain(self) -> str:
        """One character, or one `$...`."""
        char = self.text[self.at]
        if char == "\\" and self.at + 1 < len(self.text):
            self.at += 2
            return self.text[self.at - 1]
        if char == "$":
            return self._dollar()
        start = self.at
        self.at = self._until("`", start + 1) + 1 if char == "`" else start + 1  # "`...`" is a command too
        return self.text[start : self.at]

    def _dollar(self) -> str:
        start = self.at
        after = self.text[start + 1 : start + 2]
        if after in ("(", "{"):
            self.at = self._closing(start + 1)
            whole = self.text[start : self.at]
            return self._parameter(whole) if after == "{" else whole
        name = _NAME.match(self.text, start + 1)
        self.at = name.end() if name else start + 2
        return self.variables.get(name[0], f"${name[0]}") if name else ""  # "$@": what the caller adds

    def _parameter(self, whole: str) -> str:
        found = _PARAMETER.fullmatch(whole[2:-1])
        if not found:  # an array, a length, a cut: stays as it is
            return whole
        if self.variables.get(found[1]):
            return self.variables[found[1]]
        if found[2] is None:
            return self.variables.get(found[1], whole)
        inner = _Reader(found[2].replace("\n", " "))
        inner.variables = self.variables
        parts = []
        while inner.at < len(inner.text):
            parts.append(inner._part())
        return "".join(parts)

    def _closing(self, start: int) -> int:
        """The position behind the bracket that closes the one at `start`."""
        opening = self.text[start]
        closing = {"(": ")", "{": "}"}[opening]
        depth = 0
        for i in range(start, len(self.text)):
            depth += (self.text[i] == opening) - (self.text[i] == closing)
            if depth == 0:
                return i + 1
        return len(self.text)

    def _until(self, char: str, start: int | None = None) -> int:
        end = self.text.find(char, self.at if start is None else start)
        return len(self.text) if end < 0 else end
