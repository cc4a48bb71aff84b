"""Shell scripts: which words each command gets, as far as the file says.

    text -> tokens -> statements (a small syntax tree) -> commands with their words, variables put in

Nothing is run. A condition whose two sides are known is decided; of any other, the first branch is taken. Every word
carries an :class:`Origin`, so that a flag of a branch or of a loop can be named as one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kl_comedy.errors import UserError, shown

MAX_LINE = 20_000
"""Characters of one command of a shell script: splitting it takes time by the square of them."""
MAX_DEPTH = 40
"""Nested blocks, and defaults inside defaults; deeper ones are read as text."""
MAX_UNCLOSED = 100
"""Brackets that nothing closes: each is looked for to the end of the file."""
MAX_STATEMENTS = 20_000
"""Statements that are interpreted: functions that call each other could make any number."""
MAX_CALLS = 10
"""Calls of one function that are followed: one that only logs is called everywhere."""

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<index>\[[^]\s]*\])?(?P<plus>\+?)=", re.ASCII)
MEMBER = re.compile(r"\[(?P<index>[^]]*)\]=(?P<text>.*)", re.DOTALL)
"""A member of an array that is written with its index: ``[beta]=0.01``."""
NUMBER = re.compile(r"-?[0-9]{1,18}")
PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>]+")
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|([@*#?$!0-9]))", re.ASCII)
BRACED = re.compile(r"(?P<length>#?)!?(?P<name>\w+|[@*#])(?P<index>\[[^]]*\])?(?P<rest>.*)", re.DOTALL | re.ASCII)
DECLARATIONS = ("export", "local", "declare", "readonly", "typeset", "env", "set")
BLOCK_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
TESTS = ("[", "[[", "test", "true", "false", "command", "which", "type")
"""Commands of a condition that start nothing."""
SILENT = {"echo", "printf", "sed", "grep", "awk", "rm", "mkdir", "ls", "sleep", "kill", "pkill"}
"""Commands whose words do not belong to a launch."""


KINDS = ("certain", "default", "branch", "loop", "skipped")
"""From the surest to the least sure: in every case, as the default of an option, in a branch that acts as far as the
file says, with the first value of a loop, in a branch that does not act."""


@dataclass(frozen=True)
class Origin:
    """How sure it is that a word acts. ``kind`` is one of :data:`KINDS`; ``why`` says more."""

    kind: str = "certain"
    why: str = ""

    def within(self, other: Origin) -> Origin:
        """The less sure of the two."""
        return max(self, other, key=lambda origin: KINDS.index(origin.kind))


CERTAIN = Origin()


@dataclass(frozen=True)
class Word:
    """One word after expansion. A part that is not known stays as it was written, with its ``$``."""

    text: str
    origin: Origin = CERTAIN


@dataclass
class Variable:
    words: list[Word]
    is_array: bool = False
    used: bool = False


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
                statements.append(self._statement())
        self.depth -= 1
        return statements

    def _keyword(self, *words: str) -> bool:
        """Whether a keyword stands here; it is passed."""
        if self.at < len(self.tokens) and self.tokens[self.at].plain in words:
            self.at += 1
            return True
        return False

    def _statement(self) -> Statement:
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
        while self.at < len(self.tokens):
            if self.tokens[self.at].operator in ("\n", ";", ";;", "&", "&&", "||", "|", ")", "("):
                break
            self.at += 1
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


# --- what the commands get ----------------------------------------------------------------------------------------
class Interpreter:
    """Walks the statements. ``command`` gets the words of each command, ``document`` each here-document."""

    def __init__(
        self,
        command: Callable[[list[Word]], None],
        document: Callable[[list[Word], Word], None],
        count: Callable[[str], str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.variables: dict[str, Variable] = {}
        for name, text in (environment or {}).items():
            # Used: it is of the caller, who does not look for flags in it here.
            self.variables[name] = Variable([Word(text)], used=True)
        self.functions: dict[str, list[Statement]] = {}
        self.called: dict[str, int] = {}
        self.command = command
        self.document = document
        self.count = count
        self.origin = CERTAIN
        self.depth = 0
        self.guesses = 0
        """Arms around the statement that are taken though their conditions are not known."""
        self.guessed: set[str] = set()
        """Variables that such an arm assigns."""
        self.statements = 0

    def script(self, text: str) -> None:
        """Interpret a whole script."""
        self.run(Parser(Lexer(without_comments(text)).tokens()).block())
        # A function that the file defines for its caller is read too.
        for name, body in list(self.functions.items()):
            if name not in self.called:
                self.run(body)

    def run(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.statements += 1
            if self.statements > MAX_STATEMENTS:
                raise UserError(f"cannot be read: more than {MAX_STATEMENTS:,} statements")
            if isinstance(statement, Simple):
                self._simple(statement.tokens)
            elif isinstance(statement, Branches):
                self._branches(statement)
            elif isinstance(statement, Loop):
                self._loop(statement)
            else:
                self.functions[statement.name] = statement.body

    # --- control flow
    def _branches(self, statement: Branches) -> None:
        """One arm acts; the others are read for what they would set."""
        taken, is_known = self._taken(statement)
        before = self.origin
        for number, (condition, body) in enumerate(statement.arms):
            # A shell comes to a condition only if those before it are false.
            is_reached = taken < 0 or number <= taken
            if statement.subject is None and is_reached:
                self._run_condition(condition)
            reason = self._reason(statement, condition)
            if number == taken:
                self.origin = Origin("branch", reason).within(before)
                self.guesses += not is_known
                self.run(body)
                self.guesses -= not is_known
            else:
                self.origin = Origin("skipped", reason)
                self._run_and_forget(body)
            self.origin = before

    def _reason(self, statement: Branches, condition: Sequence[Token]) -> str:
        """The condition of an arm in the words of the script."""
        if not condition:
            return "else"
        keyword = "if" if statement.subject is None else "case"
        words = " ".join(self.as_written(token) for token in condition)
        return f"{keyword} {words[:60]}"

    def _run_and_forget(self, body: Sequence[Statement]) -> None:
        """Run an arm that does not act: its commands are read, its assignments are forgotten."""
        before = {name: replace(variable) for name, variable in self.variables.items()}
        self.run(body)
        for name, variable in self.variables.items():
            if name in before and variable.used:
                before[name].used = True
        self.variables = before

    def _run_condition(self, condition: Sequence[Token]) -> None:
        """The commands of a condition: ``if "$@"; then`` starts what a function gets. A test starts nothing."""
        command: list[Token] = []
        for token in [*condition, Token(operator=";")]:
            if token.operator in ("&&", "||", "|", ";", "&"):
                if command and command[0].plain not in TESTS:
                    self._simple(command)
                command = []
            elif token.plain != "!":
                command.append(token)

    def _taken(self, statement: Branches) -> tuple[int, bool]:
        """The arm that acts, the first whose condition is not false, and whether that is known; -1 for none."""
        for number, (condition, _) in enumerate(statement.arms):
            if statement.subject is not None:
                holds = self._fits(statement.subject, condition)
            else:
                holds = True if not condition else self._holds(condition)
            if holds is not False:
                return number, holds is not None
        return -1, True

    def _is_guessed(self, tokens: Sequence[Token]) -> bool:
        """Whether a variable has its value from an arm whose condition is not known."""
        written = " ".join(piece.text for token in tokens for piece in token.pieces if piece.kind == "variable")
        return any(name in self.guessed for name in re.findall(r"[A-Za-z_]\w*", written))

    def _fits(self, subject: Token, patterns: Sequence[Token]) -> bool | None:
        value = self._joined(subject)
        if self._is_guessed([subject]) or "$" in value or "`" in value:
            return None
        return any(fnmatch.fnmatchcase(value, self._joined(pattern)) for pattern in patterns)

    def _holds(self, condition: Sequence[Token]) -> bool | None:
        """Whether a test is true; None where that is not known from the file."""
        if self._is_guessed(condition):
            return None
        words = [token.operator or self._joined(token) for token in condition]
        if words and words[0] in ("[", "[[", "test"):
            words = [word for word in words[1:] if word not in ("]", "]]")]
        elif words in (["true"], ["false"]):
            return words == ["true"]
        else:
            return None
        negated = bool(words) and words[0] == "!"
        if negated:
            words = words[1:]
        holds = self._test(words)
        if holds is None:
            return None
        return holds != negated

    def _test(self, words: Sequence[str]) -> bool | None:
        if "@" not in self.variables:
            # A script that is started without arguments; a function of the file has its own.
            words = ["0" if word == "$#" else word for word in words]
            if len(words) == 2 and words[0] in ("-z", "-n") and re.fullmatch(r"\$[1-9@*]", words[1]):
                return words[0] == "-z"
        if any("$" in word or "`" in word for word in words):
            return None
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) != 3:
            return None
        left, operator, right = words
        if operator in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (operator != "!=")
        if not (NUMBER.fullmatch(left) and NUMBER.fullmatch(right)):
            return None
        difference = int(left) - int(right)
        results = {
            "-eq": difference == 0,
            "-ne": difference != 0,
            "-gt": difference > 0,
            "-lt": difference < 0,
            "-ge": difference >= 0,
            "-le": difference <= 0,
        }
        return results.get(operator)

    def _loop(self, statement: Loop) -> None:
        """The body once, with the first value of the variable."""
        before = self.origin
        if self._is_of_arguments(statement.condition):
            # `while [ $# -gt 0 ]; do case $1 in ...`: a script that is started without arguments does not enter it.
            self.origin = Origin("skipped", "an argument of the script")
            self._run_and_forget(statement.body)
            self.origin = before
            return
        values: list[Word] = []
        for token in statement.items:
            values += self.expand(token)
        if statement.variable and values:
            texts = ", ".join(word.text for word in values[:6])
            first = values[0]
            if len(values) > 1:
                first = replace(first, origin=Origin("loop", f"one of {texts}"))
            self.variables[statement.variable] = Variable([first])
        elif statement.variable:
            self.variables.pop(statement.variable, None)
        self.run(statement.body)
        self.origin = before

    def _is_of_arguments(self, condition: Sequence[Token]) -> bool:
        """Whether the condition of a loop is that the script has arguments left. A function of the file has its own."""
        if "@" in self.variables:
            return False
        words = [self.as_written(token) for token in condition]
        return words[:1] == ["getopts"] or any(word in ("$#", "$1", "${1:-}", "${1-}") for word in words)

    # --- commands
    def _simple(self, tokens: Sequence[Token]) -> None:
        """Assignments, then a command with its arguments: a function of the file, or a program."""
        documents = [token for token in tokens if token.document is not None]
        words = self._words(tokens, has_documents=bool(documents))
        for token in documents:
            self._here_document(words, token)
        if not words or documents:
            return
        name = words[0].text
        if name in self.functions:
            if self.depth < 5 and self.called.get(name, 0) < MAX_CALLS:
                self._call(words)
        elif name not in SILENT:
            self.command([self._inside(word) for word in words])

    def _words(self, tokens: Sequence[Token], *, has_documents: bool) -> list[Word]:
        """The words of a command. The assignments before it are made, and files of redirections left out.

        With a here-document ``>`` and its file stay: they name the file that the document becomes.
        """
        words: list[Word] = []
        in_prefix = True
        skip_next = False
        for token in tokens:
            if token.operator:
                # The file of a redirection is not an argument.
                skip_next = token.operator in ("<", ">", ">>")
                if token.operator in (">", ">>") and has_documents:
                    skip_next = False
                    words.append(Word(">"))
                continue
            if skip_next:
                skip_next = False
                continue
            if in_prefix and self._assign(token):
                continue
            words += self.expand(token)
            # After `export`, assignments follow; after any other word of a command, its arguments.
            in_prefix = not words or (in_prefix and words[0].text in DECLARATIONS)
        return words

    def _inside(self, word: Word) -> Word:
        return replace(word, origin=word.origin.within(self.origin))

    def _call(self, words: Sequence[Word]) -> None:
        """A function of the file, with its arguments."""
        self.called[words[0].text] = self.called.get(words[0].text, 0) + 1
        for number, word in enumerate(words[1:10], start=1):
            self.variables[str(number)] = Variable([word])
        self.variables["@"] = Variable(list(words[1:]), is_array=True)
        self.depth += 1
        self.run(self.functions[words[0].text])
        self.depth -= 1
        for name in ("@", *map(str, range(1, 10))):
            self.variables.pop(name, None)

    def _here_document(self, words: Sequence[Word], token: Token) -> None:
        assert token.document is not None
        text, expanded = token.document
        document = self._inside(self._substituted(text) if expanded else Word(text))
        if words and words[0].text == "read":
            self.variables[words[-1].text] = Variable([document])
        else:
            self.document(list(words), document)

    def _assign(self, token: Token) -> bool:
        """Take an assignment; False for any other word."""
        if not token.pieces or token.pieces[0].kind != "text" or token.pieces[0].quoted:
            return False
        match = ASSIGNMENT.match(token.pieces[0].text)
        if not match:
            return False
        if match["index"]:
            self._assign_member(match, token)
            return True
        name, is_appended = match["name"], bool(match["plus"])
        is_array = token.array is not None
        if token.array is not None:
            words = [word for item in token.array for word in self.expand(item)]
        else:
            first = replace(token.pieces[0], text=token.pieces[0].text[match.end() :])
            words = self._field([first, *token.pieces[1:]])
        words = [self._inside(word) for word in words]
        previous = self.variables.get(name)
        if is_appended and previous is not None:
            if previous.is_array or is_array:
                words = [*previous.words, *words]
                is_array = True
            else:
                words = [self._glue([*previous.words, *words])]
        self.variables[name] = Variable(words, is_array)
        if self.guesses:
            self.guessed.add(name)
        elif self.origin.kind != "skipped":
            self.guessed.discard(name)
        if self.origin.kind == "skipped":
            # What it would have set is read, though nothing will use the variable.
            self.command([Word(":"), *self._split(words)])
        return True

    def _assign_member(self, match: re.Match[str], token: Token) -> None:
        """``options[beta]=0.01``."""
        first = replace(token.pieces[0], text=token.pieces[0].text[match.end() :])
        value = self._inside(self._field([first, *token.pieces[1:]])[0])
        index = self._substituted(match["index"]).text
        variable = self.variables.setdefault(match["name"], Variable([], is_array=True))
        variable.words.append(replace(value, text=f"{index}={value.text}"))

    def _split(self, words: Sequence[Word]) -> list[Word]:
        parts = []
        for word in words:
            # What a command prints is not known; its own words are not those of the list.
            texts = [word.text] if "$(" in word.text or "`" in word.text else word.text.split()
            parts += [replace(word, text=text) for text in texts]
        return parts

    # --- expansion
    def expand(self, token: Token) -> list[Word]:
        """The words that a token becomes: an unquoted variable is split at its spaces."""
        words: list[Word] = []
        current: list[Word] = []
        for piece in token.pieces:
            parts = self._piece(piece)
            if piece.kind != "variable" or (piece.quoted and not self._is_array(piece.text)):
                current.append(self._glue(parts))
                continue
            split = parts if piece.quoted else self._split(parts)
            for number, part in enumerate(split):
                if number > 0:
                    words.append(self._glue(current))
                    current = []
                current.append(part)
        if current and (any(word.text for word in current) or any(piece.quoted for piece in token.pieces)):
            words.append(self._glue(current))
        return words

    def _field(self, pieces: Sequence[Piece]) -> list[Word]:
        """The value of an assignment, which is not split."""
        parts = []
        for piece in pieces:
            words = self._piece(piece)
            # "${ARRAY[*]}" is one word, with spaces between the members.
            parts.append(replace(self._glue(words), text=" ".join(word.text for word in words)))
        return [self._glue(parts)]

    def _as_one(self, token: Token) -> Word:
        """A token as one word, which is not split."""
        return self._glue([self._glue(self._piece(piece)) for piece in token.pieces])

    def _joined(self, token: Token) -> str:
        return self._as_one(token).text

    def _glue(self, words: Sequence[Word]) -> Word:
        """Words as one; parts of one word have no space between, members of an array have."""
        origin = CERTAIN
        for word in words:
            origin = word.origin.within(origin)
        return Word("".join(word.text for word in words), origin)

    def _is_array(self, written: str) -> bool:
        match = BRACED.fullmatch(written[2:-1]) if written.startswith("${") else None
        name = match["name"] if match else written[1:]
        return name in ("@", "*") or bool(match and match["index"] in ("[@]", "[*]"))

    def _piece(self, piece: Piece) -> list[Word]:
        if piece.kind == "text":
            return [Word(piece.text)]
        if piece.kind == "command":
            echoed = re.fullmatch(r"[`$(]+\s*echo\s+(?:-\w\s+)?[\"']?([^\"'`$|()]*)[\"']?\s*[)`]+", piece.text)
            if echoed:
                return [Word(echoed[1].strip())]
            found_program = re.fullmatch(r"[`$(]+\s*(?:which|command -v)\s+([\w./-]+)\s*[)`]+", piece.text)
            if found_program:
                return [Word(found_program[1])]
            return [Word(re.sub(r"\s+", " ", piece.text))]
        return self._variable(piece.text)

    def _variable(self, written: str) -> list[Word]:
        """The value of ``$NAME`` or ``${NAME...}``; as it was written where the file does not say."""
        unknown = [Word(written)]
        if not written.startswith("${"):
            return self._value(written[1:]) or unknown
        match = BRACED.fullmatch(written[2:-1])
        if match is None or match["length"]:
            return unknown
        value = self._value(match["name"])
        rest = match["rest"]
        if match["index"] not in (None, "[@]", "[*]"):
            return self._member(match["name"], match["index"]) or unknown
        default = re.match(r":?([-=+?])(.*)", rest, re.DOTALL)
        if default is not None:
            words = self._default(value, default[1], default[2], unknown)
            if default[1] == "=" and not value:
                # `: "${BETA:=0.04}"` gives the variable its default.
                self.variables[match["name"]] = Variable(words, used=True)
            return words
        if rest and value:
            return self._changed(value, rest) or unknown
        return value or unknown

    def _default(self, value: list[Word], operator: str, text: str, unknown: list[Word]) -> list[Word]:
        is_set = any(word.text for word in value)
        if operator == "+":
            return self._text(text) if is_set else [Word("")]
        if is_set:
            return value
        if operator in "-=":
            return self._text(text)
        return unknown

    def _changed(self, value: Sequence[Word], rest: str) -> list[Word]:
        """``${X,,}``, ``${X^^}``, ``${X%...}`` and the like: the case is changed; other forms are not known."""
        if rest == ",,":
            return [replace(word, text=word.text.lower()) for word in value]
        if rest == "^^":
            return [replace(word, text=word.text.upper()) for word in value]
        return []

    def _member(self, name: str, index: str) -> list[Word]:
        """``${options[beta]}``; the first member where the index is not known, as of a job of an array of jobs."""
        variable = self.variables.get(name)
        if variable is None or not variable.words:
            return []
        variable.used = True
        key = self._substituted(index[1:-1].strip("\"' ")).text
        named = [MEMBER.fullmatch(word.text) for word in variable.words]
        for match, word in reversed(list(zip(named, variable.words, strict=True))):
            if match is not None and match["index"].strip("\"'") == key:
                return [replace(word, text=match["text"])]
        if key in self.variables:
            # In an index, a variable may stand without its dollar.
            key = self._glue(self.variables[key].words).text
        if key.isdigit() and len(key) <= 6 and not any(named):
            return variable.words[int(key) : int(key) + 1]
        if "$" not in key and not re.search(r"[a-z]", key):
            return []
        texts = [match["text"] if match else word.text for match, word in zip(named, variable.words, strict=True)]
        return [Word(texts[0], Origin("loop", f"one of {', '.join(texts[:6])}"))]

    def _value(self, name: str) -> list[Word]:
        variable = self.variables.get(name)
        if variable is None:
            return []
        variable.used = True
        for word in variable.words:
            self.count(word.text)
        return list(variable.words)

    def _text(self, text: str) -> list[Word]:
        """A default, which may have variables itself."""
        if "$" not in text or self.depth > MAX_DEPTH:
            return [Word(text.strip("\"'"))]
        self.depth += 1
        substituted = self._substituted(text.strip("\"'"))
        self.depth -= 1
        return [substituted]

    def _substituted(self, text: str) -> Word:
        """A text with its variables put in."""
        return self._as_one(Lexer(text).document_text())

    def as_written(self, token: Token) -> str:
        return token.operator or "".join(piece.text for piece in token.pieces)

    def texts(self) -> dict[str, str]:
        """The variables that are one word, by name."""
        return {name: variable.words[0].text for name, variable in self.variables.items() if len(variable.words) == 1}

    def unused(self) -> Iterator[Variable]:
        """Variables that no command of the file got: another file does, or one that could not be followed."""
        for variable in self.variables.values():
            if not variable.used:
                yield variable
