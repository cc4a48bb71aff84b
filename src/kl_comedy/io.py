"""Files: atomic writes, hashes, locks, JSON, YAML."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, bad_value, nearest

# What a file that people write may hold (configs, grids, profiles, suites, launch files). More is a mistake or an
# attack, and would take minutes or all memory. The largest file of this repository is below a tenth of each limit.
MAX_FILE_BYTES = 1_000_000
MAX_NESTING = 100
"""Levels of lists and mappings; configs have about six."""
MAX_KEY_PARTS = 30
"""Names in a dotted key: each becomes a level."""
MAX_VALUES = 10_000
"""Keys and values of a file, those of an anchor counted again at every alias and merge key (``<<``). A text counts one
more per hundred characters, and ten per ``${...}``, which takes that much longer to read."""
MAX_NUMBER = 100
"""Characters of a number. The time for base 60 (``1:30:00``) grows with their square, and an integer of more than 4,300
digits, which hexadecimal gives quickly, cannot be written as text."""
MAX_EXPANSIONS = 2_000
"""Values that all ``${...}`` of one config stand for, each counted as often as it is written out."""
MAX_CHAIN = 20
"""Keys of which each names the next by ``${...}``."""
MAX_NAME = 220
"""Characters of a name that becomes a folder's: file systems allow 255 bytes, and a hash and a number follow."""
CHECKSUMS = "checksums.json"
"""In a folder of files that belong together: the SHA-256 of each."""

LOCK_WAIT_S = 120.0
"""Longer than creating an MLflow database takes on a busy machine (a few seconds)."""


class LockHeld(TimeoutError):
    """Another process holds the lock. ``holder`` is its process id as text, ``?`` where unknown."""

    def __init__(self, path: Path, holder: str, wait_s: float) -> None:
        super().__init__(f"{path} is locked by process {holder} for more than {wait_s:g} s")
        self.holder = holder


# --- folders that come from elsewhere --------------------------------------------------------------------------------
#
# A run folder may have been made by somebody else. A link in it could make a command read, upload or overwrite a file
# of the user's outside the run, and a pipe in a file's place would make it wait forever. So every file in a run folder
# is opened, or checked before a library opens it, by the functions below. The folder itself may be a link (runs on
# another disk), and links within it may point to its own files.

# O_NONBLOCK: opening a pipe that nobody writes would wait for a writer. O_CLOEXEC: a worker process that inherits a
# lock's descriptor would hold the lock after this process ends. Windows has none of the three flags.
_NEVER_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
_LONGEST_NAME = 255
"""Bytes of one name in a folder; every file system in use refuses longer ones."""


def inside(path: Path, root: Path) -> Path:
    """``path`` with its links resolved. Raises :class:`UserError` where they lead out of the folder ``root``."""
    real = Path(os.path.realpath(path))
    real_root = Path(os.path.realpath(root))
    if real.is_relative_to(real_root):
        return real
    raise UserError(f"{path} leads out of {root}, to {_short(real)}: links out of a run's folder are not followed")


def open_file(
    path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, root: Path | None = None, link: bool = True
) -> int:
    """A descriptor of a regular file. Never waits, for example for the other end of a pipe.

    ``root`` is the folder that no link may lead out of. With ``link=False`` the file itself must not be a link. Raises
    :class:`UserError` for a link that is not followed, a name that is too long, and anything that is not a regular file
    (a folder, a pipe, a device); OSError as ``os.open`` does.
    """
    target = path
    if root is not None:
        target = inside(path, root)
    if root is not None or not link:
        # `target` has its links resolved. A link there now was put there since, to lead this open elsewhere.
        flags |= _NO_LINK
    try:
        descriptor = os.open(target, flags | _NEVER_WAIT, mode)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{_short(path)}: {error.strerror}") from None
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a pipe that nobody reads
            raise _not_a_file(path) from None
        raise
    # Of the open descriptor and not of the path, which may name something else by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    return descriptor


def read_file(path: Path, *, root: Path | None = None) -> bytes:
    """The bytes of a regular file. Raises what :func:`open_file` raises."""
    with open(open_file(path, root=root), "rb") as file:
        return file.read()


def check_tree(root: Path, files: Iterable[str] = (), folders: Iterable[str] = ()) -> None:
    """Check what is in the folder ``root`` before anything opens it: ``files``, and ``folders`` with all that is below.

    Raises :class:`UserError` for anything that is neither a file nor a folder, and for a link that leads out of
    ``root``. A missing file is fine, and so are links to files and folders in ``root``.
    """
    for name in files:
        mode = _mode(root / name, root)
        if mode is not None and not stat.S_ISREG(mode):
            raise _not_a_file(root / name)
    waiting = [root / name for name in folders]
    visited: set[Path] = set()
    while waiting:
        path = waiting.pop()
        mode = _mode(path, root)
        if mode is None or stat.S_ISREG(mode):
            continue
        if not stat.S_ISDIR(mode):
            raise _not_a_file(path)
        # By its real path: a link to a folder above it would never end.
        real = Path(os.path.realpath(path))
        if real not in visited:
            visited.add(real)
            waiting += path.iterdir()


def _mode(path: Path, root: Path) -> int | None:
    """The ``st_mode`` of what is at ``path``, links followed; None where there is nothing."""
    if path.is_symlink():
        inside(path, root)
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{_short(path)}: {error.strerror}") from None


def is_file_name(name: str) -> bool:
    """Whether ``name`` can be that of a file right in a folder.

    >>> is_file_name("state.pt"), is_file_name("../state.pt"), is_file_name("x" * 5000)
    (True, False, False)
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    # surrogatepass: a name from JSON may hold half a surrogate pair, which must not raise here.
    return len(name.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME


def _not_a_file(path: Path) -> UserError:
    kind = _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "not a regular file")
    return UserError(f"{path} is {kind}; a file is expected there")


def _short(path: Path) -> str:
    """The path for a message, cut where it is longer than any file system allows for one name."""
    text = str(path)
    if len(text) <= _LONGEST_NAME:
        return text
    return f"{text[:100]}... ({len(text)} characters)"


# --- writing and reading ---------------------------------------------------------------------------------------------


def atomic_write(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write ``content`` (text as UTF-8). A reader, or a crash, sees the old file or the new one, never a part.

    ``private``: readable by this user only (mode 0600). Creates missing parent folders. Raises OSError where the file
    cannot be written; the old file is then unchanged.
    """
    if isinstance(content, str):
        content = content.encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic within one file system only. With the process id, because two
    # processes that shared a draft would rename each other's half-written file into place.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # What a killed process of the same id left.
        draft.unlink(missing_ok=True)
        mode = 0o600 if private else 0o666
        # O_EXCL: never through a link that somebody put in the draft's place.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            # Before the rename: after a power cut the new name could otherwise belong to an empty file.
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def check_writable(path: Path, key: str, *, is_folder: bool = False) -> None:
    """Raise :class:`UserError` where the file ``path``, or a file in the folder ``path``, cannot be written.

    Commands call this before work that takes seconds or hours. It writes nothing that stays.
    """
    if not is_folder and path.is_dir():
        raise bad_value(key, str(path), "a file", "this is a folder")
    # Some writers replace a link and some write through it, to a file that the user did not name.
    if not is_folder and path.is_symlink():
        raise bad_value(key, str(path), "a file", "this is a link; name the file itself")
    folder = path if is_folder else path.parent
    try:
        # Missing folders will be created in the nearest one that exists.
        while not folder.exists():
            folder = folder.parent
        # By a real file: permissions say nothing about a read-only disk, nor about what root may write.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{key}: cannot write {path}: {error.strerror or error}") from None


def fsync_path(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of the bytes of a regular file. Raises what :func:`open_file` raises."""
    with open(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_line(content: Mapping[str, Any]) -> bytes:
    """A JSON object as a line, for a file of lines."""
    return json.dumps(content).encode() + b"\n"


def decode_json(content: bytes) -> dict[str, Any]:
    """The JSON object in a file or a line. Raises ValueError for bytes that hold none."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object is expected")
    return value


def write_json(path: Path, content: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a JSON object atomically, indented for people."""
    atomic_write(path, json.dumps(content, indent=1) + "\n", private=private)


def read_json(path: Path, kind: str, *, root: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file. ``kind`` names it in messages.

    Its values are of any type: see :func:`kl_comedy.config.validate.parse_record` and ``read_fields``. Raises
    :class:`UserError` for any other file, and for a link that leads out of ``root``.
    """
    try:
        return decode_json(read_file(path, root=root))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable {kind} ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    # An OSError's own text repeats the path, which the message already has.
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to ``*.damaged``, in place of an earlier one. Returns the new path."""
    target = path.with_name(f"{path.name}.damaged")
    # A rename replaces a file, but not a folder that holds something.
    if target.is_dir():
        shutil.rmtree(target)
    path.replace(target)
    return target


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of the folder's files, which :func:`find_damage` compares.

    safetensors has no checksum: a flipped bit on a disk loads as another weight. Markdown files are left out: people
    edit them.
    """
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.endswith(".md"):
            digests[path.name] = sha256_file(path)
    write_json(folder / CHECKSUMS, {"files": digests})


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder; None where every file that its checksums name is there unchanged."""
    if not (folder / CHECKSUMS).is_file():
        return f"{CHECKSUMS} is missing"
    try:
        files = read_json(folder / CHECKSUMS, "list of checksums")["files"]
        for name, digest in files.items():
            # Before it is opened: the list may come from somebody else, and name any file of the user's.
            if not is_file_name(name):
                return f"{CHECKSUMS} names no file of this folder: {name[:100]!r}"
            if sha256_file(folder / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    if not files:
        return f"{CHECKSUMS} names no files"
    return None


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = LOCK_WAIT_S, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, a file that holds the process id of its holder.

    The lock ends with the process, however it ends. ``on_wait`` is called once if another process holds it. Raises
    :class:`LockHeld` after ``wait_s`` seconds, OSError where the file cannot be created, and :class:`UserError` where a
    link or a pipe is in its place. Systems without ``fcntl`` (Windows) run unlocked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT, link=False)
    # The file is never removed. A process that waits for it has it open: it would then get the lock of a file without
    # a name, beside a third process that created the file anew, and both would believe that they hold the lock.
    try:
        deadline = time.monotonic() + wait_s
        is_waiting = False
        while True:
            try:
                # Without waiting in the kernel, which has no time limit and does not say who holds it.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                    raise LockHeld(path, holder or "?", wait_s) from None
                if on_wait is not None and not is_waiting:
                    on_wait()
                is_waiting = True
                time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def existing_file(path: Path, key: str, allowed: str = "an existing file", advice: str = "") -> Path:
    """``path`` itself. Raises :class:`UserError`, with the nearest name in its folder, where it is not a file."""
    if path.is_file():
        return path
    folder = path.parent
    if path.is_dir():
        hint = "this is a folder"
    elif not folder.is_dir():
        hint = f"there is no folder {str(folder)!r}"
    else:
        files = sorted(file.name for file in folder.iterdir() if file.is_file())
        same_kind = [name for name in files if name.endswith(path.suffix)]
        near = nearest(path.name, same_kind) or nearest(path.name, files)
        if near:
            hint = f"did you mean {str(folder / near)!r}?"
        elif files:
            hint = f"{folder} holds {', '.join(files[:20])}"
        else:
            hint = f"{folder} holds no file"
    raise bad_value(key, str(path), allowed, hint + advice)


_NUMBER = re.compile(r"[-+]?(0[xb][\da-f_]+|[\d.][\d_.:]*(e[-+]?\d+)?)", re.IGNORECASE)


@contextlib.contextmanager
def yaml_errors() -> Iterator[None]:
    """Turn errors of reading YAML into a ValueError of one line.

    The line does not repeat the file's text: the path may be that of any file of the user's, a key among them.
    """
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = ""
        if mark is not None:
            place = f" (line {mark.line + 1}, column {mark.column + 1})"
        problem = re.sub(r"(?<=duplicate key ).*", "...", str(error.problem or error.context))
        problem = re.sub(r"'[^']*'", _hide_quoted, problem)
        raise ValueError(f"{problem[:100]}{place}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'it'}: cannot be read ({type(error).__name__})") from None
    except (YAMLError, TypeError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(first_line[:100] or type(error).__name__) from None


def _hide_quoted(quoted: re.Match[str]) -> str:
    # What is quoted may be the file's text; up to two characters are a sign of YAML, such as '-' or '<<'.
    is_sign = len(quoted[0]) <= len("'<<'")
    return quoted[0] if is_sign else "'...'"


@yaml_errors()
def check_yaml(text: str) -> str:
    """``mapping``, ``list`` or ``value``: what the YAML holds, or ``nothing``.

    Raises ValueError for a text that is over one of the limits above. The parser's events are counted, so that nothing
    is built before: text that is nested too deeply would overflow the stack of the parser in C, and a few aliases of
    aliases ("billion laughs") would fill the memory.
    """
    import yaml

    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES:,} characters")
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    size = _YamlSize()
    content = "nothing"
    for event in yaml.parse(text, Loader=loader):
        if content == "nothing" and isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.MappingStartEvent):
                content = "mapping"
            elif isinstance(event, yaml.SequenceStartEvent):
                content = "list"
            else:
                content = "value"
        if isinstance(event, yaml.CollectionStartEvent):
            size.open(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size.close()
        elif isinstance(event, yaml.ScalarEvent):
            could_be_number = not event.implicit[1]  # has neither quotes nor a tag
            if could_be_number and len(event.value) > MAX_NUMBER and _NUMBER.fullmatch(event.value):
                assert event.start_mark is not None
                raise ValueError(f"a number of more than {MAX_NUMBER} characters (line {event.start_mark.line + 1})")
            size.add_text(event.value, event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            size.add_alias(event.anchor, event.start_mark)
    return content


def load_yaml(text: str) -> Any:
    """The plain data of a YAML text: of a file of this package, or one that :func:`check_yaml` has let pass."""
    import yaml

    # libyaml is six times as fast, which every command feels that reads YAML. It is optional in PyYAML.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return yaml.load(text, Loader=loader)


class _YamlSize:
    """Counts keys and values, with those of an anchor again at every alias. Raises ValueError over a limit."""

    def __init__(self) -> None:
        # Of the collections that are open, the outermost first; before them the whole text.
        self._counts = [0]
        self._anchors: list[str | None] = []
        self._count_of_anchor: dict[str, int] = {}

    def open(self, anchor: str | None) -> None:
        """Begin a mapping or a list, which counts one."""
        self._anchors.append(anchor)
        self._counts.append(1)
        if len(self._anchors) > MAX_NESTING:
            raise ValueError(f"nested more than {MAX_NESTING} levels deep")

    def close(self) -> None:
        """End the innermost mapping or list. Only now is its anchor known: an alias inside it would never end."""
        count = self._counts.pop()
        anchor = self._anchors.pop()
        self._add(count, anchor)

    def add_text(self, text: str, anchor: str | None) -> None:
        self._add(1 + len(text) // 100 + 10 * text.count("${"), anchor)

    def add_alias(self, anchor: str | None, mark: Any) -> None:
        if anchor is None or anchor not in self._count_of_anchor:
            place = f"line {mark.line + 1}, column {mark.column + 1}"
            raise ValueError(f"an alias before the end of its anchor, or without one ({place})")
        self._add(self._count_of_anchor[anchor], None)

    def _add(self, count: int, anchor: str | None) -> None:
        if anchor is not None:
            self._count_of_anchor[anchor] = count
        self._counts[-1] += count
        if self._counts[-1] > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} keys and values, with aliases and merge keys written out")


def read_text(path: Path, *, limit: int = MAX_FILE_BYTES) -> str:
    """The text of a file that people write. Raises ValueError where it is too large or not UTF-8, and OSError."""
    # One byte more than allowed, and not the size of the file: /dev/zero has the size 0.
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"larger than {limit:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}: {error.reason})") from None


@yaml_errors()
def parse_yaml(text: str, *, lone_value: bool = False) -> Any:
    """The content of YAML from a file or an option, interpolations unresolved.

    With ``lone_value``, a text such as ``k3`` is that value; without, it is the key of an empty mapping, as OmegaConf
    reads it. Raises ValueError with one line.
    """
    from omegaconf import OmegaConf

    check_yaml(text)
    if lone_value:
        # As the value of an option, whose rules (dotlist) differ from a file's.
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        return parsed["value"]
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def read_yaml(path: Path, kind: str = "config", *, apart_from: Sequence[Path] = ()) -> dict[str, Any]:
    """The mapping in a YAML file, interpolations unresolved.

    Raises :class:`UserError` where the file is missing (with the nearest name, but none of ``apart_from``), is not
    YAML, or holds no mapping.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; a {kind} is a file")
    if not path.is_file():
        raise UserError(f"no such {kind} file: {path}{_yaml_hint(path, apart_from)}")
    try:
        text = read_text(path)
        if check_yaml(text) == "value":
            raise ValueError(f"a {kind} is a mapping of keys to values, and this file holds no key")
        content = parse_yaml(text)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not valid YAML: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a {kind} is a mapping of keys to values, and this file holds a list")
    return {str(key): item for key, item in content.items()}


def _yaml_hint(path: Path, apart_from: Sequence[Path]) -> str:
    """The end of a message about a missing YAML file: the nearest name, or all names, beside it or in ``configs``."""
    folder = path.parent if path.parent.is_dir() else Path("configs")
    excluded = [file.resolve() for file in apart_from]
    names = [str(file) for file in sorted(folder.glob("*.y*ml")) if file.resolve() not in excluded]
    near = nearest(str(path), names)
    if near:
        return f"; did you mean {near}?"
    if names:
        return f"; there are: {', '.join(names)}"
    return ""
