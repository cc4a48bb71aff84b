"""The syntax of shell scripts: text to tokens to statements, a small syntax tree.

Text of another language is read as simple commands, and never loops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from kl_comedy.errors import UserError, shown

MAX_DEPTH = 40
"""Nested blocks, and defaults inside defaults; deeper ones are read as text."""
MAX_LINE = 20_000
"""Characters of one command of a shell script: splitting it takes time by the square of them."""
MAX_UNCLOSED = 100
"""Brackets that nothing closes: each is looked for to the end of the file."""
PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>]+")
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|([@*#?$!0-9]))", re.ASCII)
ENDS = ("&&", "||", ")", "(")
"""Operators that end a command, but not inside ``[[ ]]``."""
BLOCK_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<index>\[[^]\s]*\])?(?P<plus>\+?)=", re.ASCII)


@dataclass(frozen=True)
class Piece:
    """A part of a word as written: ``kind`` is ``text``, ``variable`` or ``command``."""

    kind: str
    text: str
    quoted: bool


@dataclass
class Token:
    """A word, or an operator (``;``, ``&&``, a newline ...)."""

    operator: str = ""
    pieces: list[Piece] = field(default_factory=list)
    array: list[Token] | None = None
    document: tuple[str, bool] | None = None
    """The text of a here-document, and whether variables are put in."""

    @property
    def plain(self) -> str:
        """The word where it has no quotes and no variables: only such a word can be a keyword."""
        if len(self.pieces) == 1 and self.pieces[0].kind == "text" and not self.pieces[0].quoted:
            return self.pieces[0].text
        return ""


@dataclass
class Simple:
    tokens: list[Token]


@dataclass
class Branches:
    """``if`` and ``case``: pairs of a condition and a body; an empty condition is ``else``."""

    subject: Token | None
    arms: list[tuple[list[Token], list[Statement]]]


@dataclass
class Loop:
    """``for`` with the items of its variable, or ``while`` with its condition."""

    variable: str
    items: list[Token]
    condition: list[Token]
    body: list[Statement]


@dataclass
class Function:
    name: str
    body: list[Statement]


Statement = Simple | Branches | Loop | Function


# --- tokens -------------------------------------------------------------------------------------------------------
class Lexer:
    """Splits a script into tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.unclosed = 0
        self.waiting: list[tuple[Token, str, bool]] = []
        """Here-documents whose text begins after the end of the line."""

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        while self.at < len(self.text):
            token = self._next()
            if token is not None:
                found.append(token)
        return found

    def _next(self) -> Token | None:
        text = self.text
        character = text[self.at]
        if character.isspace() and character != "\n":
            self.at += 1
            return None
        if character == "\n":
            self.at += 1
            self._documents()
            return Token(operator="\n")
        if character == "#":
            end = text.find("\n", self.at)
            self.at = len(text) if end < 0 else end
            return None
        if text.startswith("<<", self.at) and not text.startswith("<<<", self.at):
            return self._document_start()
        for operator in ("&&", "||", ";;", "<<<", ">>", ";", "&", "|", "(", ")", "<", ">"):
            if text.startswith(operator, self.at):
                self.at += len(operator)
                return Token(operator=operator)
        return self._word()

    def _word(self) -> Token:
        token = Token()
        text = self.text
        while self.at < len(text):
            plain = PLAIN.match(text, self.at)
            if plain:
                token.pieces.append(Piece("text", plain[0], quoted=False))
                self.at = plain.end()
                continue
            character = text[self.at]
            if character == "(" and ASSIGNMENT.fullmatch(token.plain):
                self.at += 1
                token.array = self._array()
                return token
            if character.isspace() or character in ";&|()<>":
                break
            if character == "\\":
                token.pieces.append(Piece("text", text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif character == "'":
                self._single_quotes(token)
            elif character == '"':
                self.at += 1
                self._double_quotes(token)
            else:
                self._expansion(token, quoted=False)
        return token

    def _array(self) -> list[Token]:
        words = []
        while self.at < len(self.text):
            token = self._next()
            if token is None or token.operator == "\n":
                continue
            if token.operator == ")":
                break
            if not token.operator:
                words.append(token)
        return words

    def _single_quotes(self, token: Token) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:  # an apostrophe
            token.pieces.append(Piece("text", "'", quoted=False))
            self.at += 1
            return
        token.pieces.append(Piece("text", self.text[self.at + 1 : end], quoted=True))
        self.at = end + 1

    def document_text(self) -> Token:
        """The whole text as a here-document has it: variables are put in, quotes are characters."""
        token = Token()
        self._double_quotes(token, has_end=False)
        return token

    def _double_quotes(self, token: Token, *, has_end: bool = True) -> None:
        text = self.text
        token.pieces.append(Piece("text", "", quoted=True))
        while self.at < len(text):
            match = re.compile(r'[^"\\$`]+').match(text, self.at)
            if match:
                token.pieces.append(Piece("text", match[0], quoted=True))
                self.at = match.end()
                continue
            character = text[self.at]
            if character == '"' and has_end:
                self.at += 1
                return
            if character == '"':
                token.pieces.append(Piece("text", '"', quoted=True))
                self.at += 1
            elif character == "\\":
                escaped = text[self.at + 1 : self.at + 2]
                kept = escaped if escaped in '"\\$`' else f"\\{escaped}"
                token.pieces.append(Piece("text", kept, quoted=True))
                self.at += 2
            else:
                self._expansion(token, quoted=True)

    def _expansion(self, token: Token, *, quoted: bool) -> None:
        """``$NAME``, ``${...}``, ``$(...)`` or backquotes at this place."""
        text = self.text
        if text[self.at] == "`":
            end = text.find("`", self.at + 1)
            if end < 0:
                self.at += 1
                return
            token.pieces.append(Piece("command", text[self.at : end + 1], quoted))
            self.at = end + 1
            return
        opening = text[self.at + 1 : self.at + 2]
        if opening in ("{", "("):
            closing = "}" if opening == "{" else ")"
            end = self._close(self.at + 2, opening, closing)
            if end >= 0:
                kind = "variable" if opening == "{" else "command"
                token.pieces.append(Piece(kind, text[self.at : end + 1], quoted))
                self.at = end + 1
                return
        match = VARIABLE.match(text, self.at)
        if match:
            token.pieces.append(Piece("variable", match[0], quoted))
            self.at = match.end()
            return
        token.pieces.append(Piece("text", "$", quoted))
        self.at += 1

    def _close(self, start: int, opening: str, closing: str) -> int:
        """Where the bracket that was opened before ``start`` closes; -1 for nowhere."""
        depth = 1
        for match in re.compile(rf"\\.|[{re.escape(opening + closing)}]", re.DOTALL).finditer(self.text, start):
            if match[0] == opening:
                depth += 1
            elif match[0] == closing:
                depth -= 1
            if depth == 0:
                return match.start()
        self.unclosed += 1
        if self.unclosed > MAX_UNCLOSED:
            raise UserError(f"cannot be read: more than {MAX_UNCLOSED} brackets that nothing closes")
        return -1

    def _document_start(self) -> Token | None:
        match = re.compile(r"<<-?[ \t]*(['\"\\]?)(\w+)['\"]?").match(self.text, self.at)
        if not match:
            self.at += 2
            return None
        self.at = match.end()
        token = Token(operator="<<")
        self.waiting.append((token, match[2], not match[1]))
        return token

    def _documents(self) -> None:
        """The texts of the here-documents of the line that ended."""
        for token, end_word, expanded in self.waiting:
            end = re.compile(rf"^[ \t]*{end_word}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            stop = end.start() if end else len(self.text)
            token.document = (self.text[self.at : stop], expanded)
            self.at = end.end() if end else stop
        self.waiting = []


def without_comments(text: str) -> str:
    """The script without lines of comment, continued lines joined.

    Comments first: one between two continued lines would otherwise hide the rest of the command, which is what its
    author means.
    """
    joined = re.sub(r"\\\r?\n", " ", re.sub(r"(?m)^[ \t]*#.*$\n?", "", text))
    for line in joined.splitlines():
        if len(line) > MAX_LINE:
            raise UserError(f"a command of more than {MAX_LINE:,} characters: {shown(line[:100])}")
    return joined


def _is_test(statement: Statement) -> TypeGuard[Simple]:
    """Whether a statement is a test, which only decides what follows."""
    return isinstance(statement, Simple) and bool(statement.tokens) and statement.tokens[0].plain in ("[", "[[", "test")


# --- statements ---------------------------------------------------------------------------------------------------
class Parser:
    """Tokens to statements. Text of another language is read as simple commands."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def block(self, ends: Sequence[str] = ()) -> list[Statement]:
        """Statements up to a keyword of ``ends``, which stays."""
        statements: list[Statement] = []
        self.depth += 1
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.operator in ("\n", ";", "&", "&&", "||", "|", "(", ")"):
                self.at += 1
            elif token.operator == ";;" or token.plain in ends:
                if token.operator == ";;" and ";;" not in ends:
                    self.at += 1
                    continue
                break
            else:
                statements.append(self._list())
        self.depth -= 1
        return statements

    def _operator(self, *operators: str) -> str:
        """The operator that stands here, if it is one of these: it is passed, with the line ends after it."""
        if self.at >= len(self.tokens) or self.tokens[self.at].operator not in operators:
            return ""
        operator = self.tokens[self.at].operator
        self.at += 1
        while self.at < len(self.tokens) and self.tokens[self.at].operator == "\n":
            self.at += 1
        return operator

    def _list(self) -> Statement:
        """``[ test ] && command || other``; statements after any other command than a test run in every case."""
        first = self._statement()
        if not _is_test(first):
            return first
        condition = list(first.tokens)
        while operator := self._operator("&&", "||"):
            statement = self._statement()
            if _is_test(statement):
                condition += [Token(operator=operator), *statement.tokens]
            elif operator == "||":
                return Branches(None, [(condition, []), ([], [statement])])
            else:
                return Branches(None, self._arms_after(condition, statement))
        return Simple(condition)

    def _arms_after(self, condition: list[Token], statement: Statement) -> list[tuple[list[Token], list[Statement]]]:
        """The commands that follow ``[ test ] &&``, and those after ``||``."""
        body = [statement]
        while self._operator("&&"):
            body.append(self._statement())
        arms: list[tuple[list[Token], list[Statement]]] = [(condition, body)]
        if self._operator("||"):
            arms.append(([], [self._statement()]))
        return arms

    def _keyword(self, *words: str) -> bool:
        """Whether a keyword stands here; it is passed."""
        if self.at < len(self.tokens) and self.tokens[self.at].plain in words:
            self.at += 1
            return True
        return False

    def _statement(self) -> Statement:
        if self.at >= len(self.tokens):
            return Simple([])
        word = self.tokens[self.at].plain
        if self.depth < MAX_DEPTH:
            if word == "if":
                return self._if()
            if word == "case":
                return self._case()
            if word in ("for", "while", "until", "select"):
                return self._loop(word)
            if word == "function" or self._is_function():
                return self._function(word)
        if word in ("{", "!", "time", "exec") or word in BLOCK_ENDS:
            self.at += 1
            return Simple([])
        return Simple(self._command())

    def _command(self) -> list[Token]:
        """The tokens of a simple command."""
        start = self.at
        is_test = self.tokens[start].plain == "[["
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            # `[[ a && b ]]` is one command.
            if token.operator in ("\n", ";", ";;", "&", "|") or (
                token.operator and not is_test and token.operator in ENDS
            ):
                break
            self.at += 1
            if is_test and token.plain == "]]":
                is_test = False
        if self.at == start:
            self.at += 1
        return [token for token in self.tokens[start : self.at] if token.operator not in (")", "(")]

    def _condition(self, end: str) -> list[Token]:
        """Everything up to ``then`` or ``do``."""
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at].plain != end:
            self.at += 1
        condition = self.tokens[start : self.at]
        self._keyword(end)
        return [token for token in condition if token.operator not in ("\n", ";")]

    def _if(self) -> Branches:
        self.at += 1
        arms = []
        while True:
            condition = self._condition("then")
            arms.append((condition, self.block(("elif", "else", "fi"))))
            if not self._keyword("elif"):
                break
        if self._keyword("else"):
            arms.append(([], self.block(("fi",))))
        self._keyword("fi")
        return Branches(None, arms)

    def _case(self) -> Branches:
        self.at += 1
        subject = self.tokens[self.at] if self.at < len(self.tokens) else Token()
        self.at += 1
        while self.at < len(self.tokens) and not self._keyword("in"):
            self.at += 1
        arms = []
        while self.at < len(self.tokens):
            while self.at < len(self.tokens) and self.tokens[self.at].operator in ("\n", "(", ";;", ";"):
                self.at += 1
            if self._keyword("esac") or self.at >= len(self.tokens):
                break
            patterns = []
            while self.at < len(self.tokens) and self.tokens[self.at].operator != ")":
                patterns.append(self.tokens[self.at])
                self.at += 1
            self.at += 1
            body = self.block((";;", "esac"))
            arms.append(([token for token in patterns if not token.operator], body))
        return Branches(subject, arms)

    def _loop(self, word: str) -> Loop:
        self.at += 1
        variable = ""
        items: list[Token] = []
        condition: list[Token] = []
        if word in ("for", "select") and self.at < len(self.tokens):
            variable = self.tokens[self.at].plain
            self.at += 1
            has_items = self._keyword("in")
            header = self._condition("do")
            if has_items:
                items = [token for token in header if not token.operator]
        else:
            condition = self._condition("do")
        body = self.block(("done",))
        self._keyword("done")
        return Loop(variable, items, condition, body)

    def _is_function(self) -> bool:
        following = [token.operator for token in self.tokens[self.at + 1 : self.at + 3]]
        return bool(self.tokens[self.at].plain) and following == ["(", ")"]

    def _function(self, word: str) -> Function | Simple:
        if word == "function":
            self.at += 1
        name = self.tokens[self.at].plain if self.at < len(self.tokens) else ""
        self.at += 1
        while self.at < len(self.tokens) and self.tokens[self.at].operator in ("(", ")", "\n"):
            self.at += 1
        if not self._keyword("{"):
            return Simple([])
        body = self.block(("}",))
        self._keyword("}")
        return Function(name, body)
