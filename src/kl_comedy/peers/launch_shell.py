"""Shell scripts: which words each command gets, as far as the file says.

    text -> launch_shell_syntax (a small syntax tree) -> commands with their words, variables put in

Nothing is run. A condition whose two sides are known is decided; of any other, the first branch is taken. Every word
carries an :class:`Origin`, so that a flag of a branch or of a loop can be named as one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kl_comedy.errors import UserError
from kl_comedy.peers.launch_shell_syntax import (
    ASSIGNMENT,
    MAX_DEPTH,
    Branches,
    Lexer,
    Loop,
    Parser,
    Piece,
    Simple,
    Statement,
    Token,
    without_comments,
)

MAX_STATEMENTS = 20_000
"""Statements that are interpreted: functions that call each other could make any number."""
MAX_CUT = 200
"""Characters of a value from which a pattern is cut: each of its parts is compared."""
MAX_CALLS = 10
"""Calls of one function that are followed: one that only logs is called everywhere."""

MEMBER = re.compile(r"\[(?P<index>[^]]*)\]=(?P<text>.*)", re.DOTALL)
"""A member of an array that is written with its index: ``[beta]=0.01``."""
PROCESS_NUMBER = re.compile(r"\b(SLURM_(PROCID|NODEID|LOCALID)|PMI_RANK|((NODE|MACHINE|LOCAL|GLOBAL)_)?RANK)\b")
"""Variables that number the processes of one job."""

PLAIN_PATTERN = re.compile(r"[\w-]+")
"""A pattern that has no operators: another's are not run, as one may take for ever."""
CONDITIONAL_ECHO = re.compile(r"\$\(\s*(\[.*?\]\]?)\s*&&\s*echo\s+[\"']?([^\"'`$|()]*)[\"']?\s*\)")
NUMBER = re.compile(r"-?[0-9]{1,18}")
BRACED = re.compile(r"(?P<length>#?)!?(?P<name>\w+|[@*#])(?P<index>\[[^]]*\])?(?P<rest>.*)", re.DOTALL | re.ASCII)
DECLARATIONS = ("export", "local", "declare", "readonly", "typeset", "env", "set")
TESTS = ("[", "[[", "test", "true", "false", "command", "which", "type")
"""Commands of a condition that start nothing."""
NO_PROGRAMS = ("export", "local", "declare", "readonly", "typeset", "eval")
"""Words of the shell before assignments or a command: systems have programs of the same names, as ``swift export``."""
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
        """One arm acts, or each in another process; the others are read for what they would set."""
        taken, is_known = self._taken(statement)
        before = self.origin
        conditions = " ".join(self._reason(statement, condition) for condition, _ in statement.arms)
        is_by_process = PROCESS_NUMBER.search(conditions) is not None
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
            elif is_by_process:
                # Another process of the same job takes this arm: what it starts acts as well.
                self.origin = Origin("branch", reason).within(before)
                self._run_and_forget(body)
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
        # An assignment makes a new variable, so those of before need no copy of their own.
        before = dict(self.variables)
        self.run(body)
        self.variables = before

    def _run_condition(self, condition: Sequence[Token]) -> None:
        """The commands of a condition: ``if "$@"; then`` starts what a function gets. A test starts nothing."""
        command: list[Token] = []
        in_test = [token.operator for token in condition[:2]] == ["(", "("]
        for token in [*condition, Token(operator=";")]:
            if token.plain in TESTS and not command:
                in_test = token.plain == "[["
                command.append(token)
            elif token.operator in ("&&", "||", "|", ";", "&") and not in_test:
                if command and command[0].plain not in TESTS:
                    self._simple(command)
                command = []
            elif token.plain != "!" and not in_test:
                command.append(token)
            in_test = in_test and token.plain != "]]"

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
        """Whether tests are true, also several with ``&&`` and ``||``; None where that is not known from the file."""
        if self._is_guessed(condition):
            return None
        words = [token.operator or self._joined(token) for token in condition]
        if words[:2] == ["(", "("]:
            return self._compares(words[2:-2])
        holds: bool | None = None
        operator = ""
        clause: list[str] = []
        is_inside = False
        for word in [*words, "&&"]:
            if word not in ("&&", "||"):
                clause.append(word)
                continue
            result, is_inside = self._clause(clause, is_inside)
            holds = _joined_results(holds, operator, result)
            operator = word
            clause = []
        return holds

    def _clause(self, words: Sequence[str], is_inside: bool) -> tuple[bool | None, bool]:
        """Whether one test is true, and whether ``[[`` is still open after it."""
        if list(words) in (["true"], ["false"]):
            return words[0] == "true", False
        is_open = is_inside or (bool(words) and words[0] in ("[", "[[", "test"))
        if not is_open:
            return None, False
        is_closed = bool(words) and words[-1] in ("]", "]]")
        words = [word for word in words if word not in ("[", "[[", "test", "]", "]]")]
        is_negated = bool(words) and words[0] == "!"
        if is_negated:
            words = words[1:]
        holds = self._test(words)
        if holds is not None and is_negated:
            holds = not holds
        return holds, not is_closed

    def _compares(self, words: Sequence[str]) -> bool | None:
        """``(( N > 1 ))``, where a variable may stand without its dollar."""
        texts = []
        for word in words:
            variable = self.variables.get(word)
            texts.append(self._glue(variable.words).text if variable is not None else word)
        operators = {">": "-gt", "<": "-lt", "==": "-eq", "!=": "-ne"}
        if len(texts) != 3 or texts[1] not in operators:
            return None
        return self._test([texts[0], operators[texts[1]], texts[2]])

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
        if operator == "=~" and PLAIN_PATTERN.fullmatch(right):
            return right in left
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
            arguments = words[1:] if name in NO_PROGRAMS else words
            if arguments:
                self.command([self._inside(word) for word in arguments])

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
        member = replace(value, text=f"{index}={value.text}")
        previous = self.variables.get(match["name"])
        words = [] if previous is None else previous.words
        self.variables[match["name"]] = Variable([*words, member], is_array=True)

    def _split(self, words: Sequence[Word]) -> list[Word]:
        parts = []
        for word in words:
            # What a command prints is not known; its own words are not those of the list.
            texts = [word.text] if "$(" in word.text or "`" in word.text else word.text.split()
            parts += [replace(word, text=text) for text in texts]
        return parts

    # --- expansion
    def expand(self, token: Token) -> list[Word]:
        """The words that a token becomes: an unquoted variable, or what a command prints, is split at its spaces."""
        words: list[Word] = []
        current: list[Word] = []
        for piece in token.pieces:
            parts = self._piece(piece)
            if piece.kind == "text" or (piece.quoted and not self._is_array(piece.text)):
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
            conditional = CONDITIONAL_ECHO.fullmatch(piece.text)
            if conditional:
                return [self._conditional(conditional[1], conditional[2])]
            found_program = re.fullmatch(r"[`$(]+\s*(?:which|command -v)\s+([\w./-]+)\s*[)`]+", piece.text)
            if found_program:
                return [Word(found_program[1])]
            return [Word(re.sub(r"\s+", " ", piece.text))]
        return self._variable(piece.text)

    def _conditional(self, test: str, text: str) -> Word:
        """``$([ "$KL" = 1 ] && echo "--use-kl-loss")``."""
        holds = self._holds(Lexer(test).tokens())
        if holds is False:
            # What it would have set is read.
            self.command([Word(":"), *self._split([Word(text, Origin("skipped", f"if {test[:60]}"))])])
            return Word("")
        return Word(text, CERTAIN if holds else Origin("branch", f"if {test[:60]}"))

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
        """``${X,,}``, ``${X^^}``, ``${X##*kl}``, ``${X%.yaml}``, ``${X/a/b}``; other forms are not known."""
        if rest == ",,":
            return [replace(word, text=word.text.lower()) for word in value]
        if rest == "^^":
            return [replace(word, text=word.text.upper()) for word in value]
        words = []
        for word in value:
            text = _cut(word.text, rest) if len(word.text) <= MAX_CUT else None
            if text is None:
                return []
            words.append(replace(word, text=text))
        return words

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


def _joined_results(left: bool | None, operator: str, right: bool | None) -> bool | None:
    """``left && right`` or ``left || right``, of which each may be unknown; ``right`` alone at the start."""
    if not operator:
        return right
    decisive = operator == "||"
    if left is decisive or right is decisive:
        return decisive
    return None if left is None or right is None else not decisive


def _cut(text: str, rest: str) -> str | None:
    """``text`` without the part that a pattern matches, or with a part replaced; None for another form."""
    match = re.fullmatch(r"(##?|%%?)([^$`]+)|//?([^/$`*?]+)/([^$`]*)", rest)
    if match is None:
        return None
    if match[3] is not None:
        return text.replace(match[3], match[4], -1 if rest.startswith("//") else 1)
    lengths = range(len(text) + 1)
    if len(match[1]) == 2:
        lengths = lengths[::-1]
    for length in lengths:
        part = text[:length] if match[1].startswith("#") else text[len(text) - length :]
        if fnmatch.fnmatchcase(part, match[2]):
            return text[length:] if match[1].startswith("#") else text[: len(text) - length]
    return text
