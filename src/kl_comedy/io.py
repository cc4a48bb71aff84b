"""Files: atomic writes, hashes, checksums, locks, YAML."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, bad_value, nearest

log = logging.getLogger("kl_comedy")

# What a file that people write may hold (configs, grids, profiles, suites, launch files). More is a mistake or an
# attack, and would take minutes or all memory; the largest file of this repository is below a tenth of each limit.
MAX_FILE_BYTES = 1_000_000
MAX_NESTING = 100
"""Levels of lists and mappings; configs have about six."""
MAX_KEY_PARTS = 30
"""Names in a dotted key: each becomes a level."""
MAX_VALUES = 10_000
"""Keys and values of a file, those of an anchor counted again at every alias and merge key (``<<``). A text counts one
more for each hundred characters, and ten for each ``${...}``, which takes that much longer to read."""
MAX_NUMBER = 100
"""Characters of a number. Base 60 (``1:30:00``) takes time by the square of them, and an integer of more than 4,300
digits, which hexadecimal gives quickly, cannot be written as text."""
MAX_EXPANSIONS = 2_000
"""Values that the ``${...}`` of one config stand for, each counted as often as it is written out."""
MAX_CHAIN = 20
"""Keys of which each names the next by ``${...}``."""
MAX_NAME = 220
"""Characters of a name that becomes a folder's: file systems allow 255 bytes, and a hash and a number follow."""
CHECKSUMS = "checksums.json"
"""In a folder of files that belong together: the SHA-256 of each."""
_CRC = re.compile(rb',\s*"crc32": "([0-9a-f]{8})"\s*}\s*')

LOCK_WAIT_S = 120.0
"""Longer than creating an MLflow database takes on a busy machine (a few seconds)."""


class LockHeld(TimeoutError):
    """Another process holds the lock. ``holder`` is its process id as text, ``?`` where unknown."""

    def __init__(self, path: Path, holder: str, wait_s: float) -> None:
        super().__init__(f"{path} is locked by process {holder} for more than {wait_s:g} s")
        self.holder = holder


# --- folders that come from elsewhere --------------------------------------------------------------------------------
#
# A run folder may have been made by somebody else. A link in it would have us read, upload or overwrite a file of the
# user's that is none of the run's, and a pipe in a file's place would have us wait for ever. So every file of ours in a
# run folder is opened, or checked before a library opens it, by the functions below. The folder itself may be a link
# (runs on another disk), and links within it may point to its own files.

_NEVER_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
_LONGEST_NAME = 255
"""Bytes of one name in a folder; every file system in use refuses longer ones."""


def inside(path: Path, root: Path) -> Path:
    """``path`` with its links resolved. Raises :class:`UserError` where they lead out of the folder ``root``."""
    real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    if real.is_relative_to(real_root):
        return real
    raise UserError(f"{path} leads out of {root}, to {_short(real)}: links out of a run's folder are not followed")


def open_file(
    path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, root: Path | None = None, link: bool = True
) -> int:
    """A descriptor of a regular file. Never waits, as for the other end of a pipe.

    ``root``: the folder that no link may lead out of. ``link=False``: the file is no link at all. Raises
    :class:`UserError` for a link that is not followed, a name that is too long, and what is no file (a folder, a pipe,
    a device); OSError as ``os.open``.
    """
    target = path if root is None else inside(path, root)
    if root is not None or not link:
        flags |= _NO_LINK
    try:
        descriptor = os.open(target, flags | _NEVER_WAIT, mode)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{_short(path)}: {error.strerror}") from None
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a pipe that nobody reads
            raise _no_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def read_file(path: Path, *, root: Path | None = None) -> bytes:
    """The bytes of a regular file. Raises as :func:`open_file`."""
    with open(open_file(path, root=root), "rb") as file:
        return file.read()


def check_tree(root: Path, files: Iterable[str] = (), folders: Iterable[str] = ()) -> None:
    """Check what is in the folder ``root`` before anything opens it: ``files``, and ``folders`` with all that is below.

    Raises :class:`UserError` for what is neither file nor folder, and for a link that leads out of ``root``. What is
    not there is fine, and so are links to files and folders in ``root``.
    """
    for name in files:
        mode = _mode(root / name, root)
        if mode is not None and not stat.S_ISREG(mode):
            raise _no_file(root / name)
    waiting, visited = [root / name for name in folders], set[Path]()
    while waiting:
        path = waiting.pop()
        mode = _mode(path, root)
        if mode is None or stat.S_ISREG(mode):
            continue
        if not stat.S_ISDIR(mode):
            raise _no_file(path)
        real = Path(os.path.realpath(path))
        if real not in visited:  # a link to a folder above it would never end
            visited.add(real)
            waiting += path.iterdir()


def _mode(path: Path, root: Path) -> int | None:
    """The type of what is at ``path``, links followed; None where there is nothing."""
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
    plain = "/" not in name and "\0" not in name and name not in ("", ".", "..")
    return plain and len(name.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME


def _no_file(path: Path) -> UserError:
    kind = _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "no file")
    return UserError(f"{path} is {kind}; a file is expected there")


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= _LONGEST_NAME else f"{text[:100]}... ({len(text)} characters)"


# --- writing and reading ---------------------------------------------------------------------------------------------


def atomic_write(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write ``content`` (text as UTF-8). A reader or a crash sees the old file or the new one, never a part.

    ``private``: for this user only (mode 0600). Creates missing parent folders. Raises OSError where the file cannot be
    written; the old file is then unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        mode = 0o600 if private else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never through a link that somebody put there
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def fsync_path(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of the bytes of a regular file. Raises as :func:`open_file`."""
    with open(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_json(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A JSON object with a last key ``crc32``, the checksum of the bytes before it, and a newline.

    >>> encode_json({"step": 1})
    b'{"step": 1, "crc32": "3daa833a"}\\n'
    """
    text = json.dumps(content, indent=indent)[:-1].rstrip().encode()
    space, end = (b" ", b"") if indent is None else (b"\n" + b" " * indent, b"\n")
    return text + b"," + space + b'"crc32": "%08x"' % zlib.crc32(text) + end + b"}\n"


def decode_json(content: bytes) -> dict[str, Any]:
    """The JSON object without its checksum; one of an earlier version has none. Raises ValueError for damaged bytes."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object is expected")
    if value.pop("crc32", None) is not None:
        end = _CRC.fullmatch(content, content.rfind(b","))
        if end is None or int(end[1], 16) != zlib.crc32(content[: end.start()]):
            raise ValueError("its bytes do not have its checksum")
    return value


def write_json(path: Path, content: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a JSON object atomically, with the checksum that :func:`read_json` compares."""
    atomic_write(path, encode_json(content, indent=1), private=private)


def read_json(
    path: Path, kind: str, keys: Mapping[str, type] | None = None, *, root: Path | None = None
) -> dict[str, Any]:
    """The JSON object in a file, with ``keys`` of these types. Raises :class:`UserError` for any other file, and for a
    link that leads out of ``root``."""
    try:
        content = decode_json(read_file(path, root=root))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no readable {kind} ({_reason(error)})") from None
    for key, expected in (keys or {}).items():
        if not isinstance(content.get(key), expected):
            raise UserError(f"{path} is no readable {kind} (it has no {expected.__name__} {key!r})")
    return content


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to ``*.damaged``, in place of an earlier one; the new path."""
    target = path.with_name(f"{path.name}.damaged")
    if target.is_dir():
        shutil.rmtree(target)
    path.replace(target)
    return target


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of the folder's files, which :func:`find_damage` compares; texts for people (.md) aside."""
    files = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
    write_json(folder / CHECKSUMS, {"files": {name: digest for name, digest in files.items() if name[-3:] != ".md"}})


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder, or None where every file of its checksums is there unchanged."""
    if not (folder / CHECKSUMS).is_file():
        return f"{CHECKSUMS} is missing"
    try:
        files = read_json(folder / CHECKSUMS, "list of checksums", {"files": dict})["files"]
        for name, digest in files.items():
            if not is_file_name(name):
                return f"{CHECKSUMS} names no file of this folder: {name[:100]!r}"
            if sha256_file(folder / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (UserError, OSError, ValueError, TypeError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    return None if files else f"{CHECKSUMS} names no files"


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = LOCK_WAIT_S, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created if absent, never removed: removing it would race).

    The lock ends with the process. ``on_wait`` is called once when another process holds it. Raises
    :class:`LockHeld` after ``wait_s`` seconds, OSError where the file cannot be created, and :class:`UserError` where a
    link or a pipe is in its place. Systems without ``fcntl`` (Windows) run unlocked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = open_file(path, os.O_RDWR | os.O_CREAT, link=False)
    try:
        deadline = time.monotonic() + wait_s
        waiting = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
                    raise LockHeld(path, holder, wait_s) from None
                if on_wait is not None and not waiting:
                    on_wait()
                waiting = True
                time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode("ascii"), 0)
        yield
    finally:
        os.close(fd)


def existing_file(path: Path, key: str, allowed: str = "an existing file", advice: str = "") -> Path:
    """``path``. Raises :class:`UserError` where it is no file, with the nearest name in its folder."""
    if path.is_file():
        return path
    folder = path.parent
    if path.is_dir():
        hint = "this is a folder"
    elif not folder.is_dir():
        hint = f"there is no folder {str(folder)!r}"
    else:
        files = sorted(file.name for file in folder.iterdir() if file.is_file())
        near = nearest(path.name, [name for name in files if name.endswith(path.suffix)]) or nearest(path.name, files)
        holds = f"{folder} holds {', '.join(files[:20]) or 'no file'}"
        hint = f"did you mean {str(folder / near)!r}?" if near else holds
    raise bad_value(key, str(path), allowed, hint + advice)


_YAML_CRC = re.compile(rb"# crc32 ([0-9a-f]{8})[ -~]*\n")


def write_yaml(path: Path, text: str) -> None:
    """Write YAML atomically, for this user only, with its checksum as the first line."""
    content = text.encode()
    atomic_write(
        path, b"# crc32 %08x (remove this line where you change others)\n" % zlib.crc32(content) + content, private=True
    )


def yaml_is_changed(path: Path) -> bool | None:
    """Whether the text is not the one that :func:`write_yaml` wrote; None where that cannot be said."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    start = _YAML_CRC.match(content)
    return None if start is None else int(start[1], 16) != zlib.crc32(content[start.end() :])


_NUMBER = re.compile(r"[-+]?(0[xb][\da-f_]+|[\d.][\d_.:]*(e[-+]?\d+)?)", re.IGNORECASE)


@contextlib.contextmanager
def yaml_errors() -> Iterator[None]:
    """Errors of reading YAML become a ValueError of one line.

    It does not repeat the text: what was meant as a config may be the path of anything.
    """
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = re.sub(r"(?<=duplicate key ).*", "...", str(error.problem or error.context))
        problem = re.sub(r"'[^']*'", lambda quoted: quoted[0] if len(quoted[0]) <= 4 else "'...'", problem)
        raise ValueError(f"{problem[:100]}{where}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'it'}: cannot be read ({type(error).__name__})") from None
    except (YAMLError, TypeError) as error:
        raise ValueError(str(error).strip().split("\n")[0][:100] or type(error).__name__) from None


@yaml_errors()
def check_yaml(text: str) -> str:
    """``mapping``, ``list`` or ``value``: what the YAML holds, or ``nothing``.

    Raises ValueError for what is over one of the limits above. The events of the parser are counted, so that nothing is
    built before; loading text that is nested too deeply would overflow the stack of the parser in C.
    """
    import yaml

    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES:,} characters")
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    counts = [0]  # of the collections that are open, the outermost first
    anchors: list[str | None] = []
    count_of_anchor: dict[str, int] = {}
    content = "nothing"
    for event in yaml.parse(text, Loader=loader):
        if content == "nothing" and isinstance(event, yaml.NodeEvent):
            content = {yaml.MappingStartEvent: "mapping", yaml.SequenceStartEvent: "list"}.get(type(event), "value")
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            counts.append(1)
            if len(anchors) > MAX_NESTING:
                raise ValueError(f"nested more than {MAX_NESTING} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            count = counts.pop()
            anchor = anchors.pop()
            if anchor is not None:
                count_of_anchor[anchor] = count
            counts[-1] += count
        elif isinstance(event, yaml.ScalarEvent):
            quoted = event.implicit[1]  # and without a tag: neither can be a number
            if len(event.value) > MAX_NUMBER and not quoted and _NUMBER.fullmatch(event.value):
                raise ValueError(f"a number of more than {MAX_NUMBER} characters (line {event.start_mark.line + 1})")
            count = 1 + len(event.value) // 100 + 10 * event.value.count("${")
            if event.anchor is not None:
                count_of_anchor[event.anchor] = count
            counts[-1] += count
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in count_of_anchor:
                where = f"line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"
                raise ValueError(f"an alias before the end of its anchor, or without one ({where})")
            counts[-1] += count_of_anchor[event.anchor]
        if counts[-1] > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} keys and values, with aliases and merge keys written out")
    return content


def read_text(path: Path) -> str:
    """The text of a file that people write. Raises ValueError where it is too large or not UTF-8, and OSError."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}: {error.reason})") from None


@yaml_errors()
def parse_yaml(text: str, *, lone_value: bool = False) -> Any:
    """The content of YAML from a file or an option, interpolations unresolved.

    ``lone_value``: a text such as ``k3`` is that value; else it is the key of an empty mapping, as OmegaConf reads it.
    Raises ValueError with one line.
    """
    from omegaconf import OmegaConf

    check_yaml(text)
    if lone_value:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        return parsed["value"] if isinstance(parsed, dict) else None
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def read_yaml(path: Path, kind: str = "config") -> dict[str, Any]:
    """The mapping in a YAML file, interpolations unresolved.

    Raises :class:`UserError` where the file is missing (with the nearest name), is no YAML, or holds no mapping.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; a {kind} is a file")
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("configs")
        names = [str(file) for file in sorted(folder.glob("*.y*ml"))]
        near = nearest(str(path), names)
        hint = f"; did you mean {near}?" if near else (f"; there are: {', '.join(names)}" if names else "")
        raise UserError(f"no such {kind} file: {path}{hint}")
    try:
        text = read_text(path)
        if check_yaml(text) == "value":
            raise ValueError(f"a {kind} is a mapping of keys to values, and this file holds no key")
        content = parse_yaml(text)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not valid YAML: {_reason(error)}") from None
    if yaml_is_changed(path):
        log.warning("%s is not as it was written (where you changed it, remove its first line)", path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: a {kind} is a mapping of keys to values, and this file holds a list")
    return {str(key): item for key, item in content.items()}
