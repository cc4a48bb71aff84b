"""The words of commands in a shell script are those that bash gives them when it runs the script."""

import subprocess

import pytest

from kl_comedy.peers.launch_shell import Interpreter

RUN = "run() { printf '%s\\037' \"$@\"; printf '\\n'; }\n"


def calls_in_bash(script):
    """The arguments of every call of ``run`` when bash runs the script."""
    done = subprocess.run(["bash", "-c", RUN + script], capture_output=True, text=True, check=True, timeout=60)
    return [line.split("\037")[:-1] for line in done.stdout.splitlines()]


def calls_that_are_read(script):
    """The same as the reader has them, without those of branches that are not taken."""
    calls = []

    def command(words):
        texts = [word.text for word in words]
        if texts[0] == "run" and words[-1].origin.kind != "skipped":
            calls.append(texts[1:])

    Interpreter(command, lambda words, text: None, lambda text: text).script(script)
    return calls


COMPARISONS = [
    f"if [ {left} {operator} {right} ]; then run yes; else run no; fi"
    for operator in ("-eq", "-ne", "-gt", "-lt", "-ge", "-le")
    for left, right in ((1, 2), (2, 2), (2, 1))
]
TEXTS = [
    f"X={value}\nif {opening} {negation}{test} {closing}; then run yes; else run no; fi"
    for value in ("", "verl", "verl-7b")
    for negation in ("", "! ")
    for opening, closing in (("[", "]"), ("[[", "]]"))
    for test in ('-z "$X"', '-n "$X"', '"$X" = verl', '"$X" != verl')
]
SCRIPTS = [
    *COMPARISONS,
    *TEXTS,
    "X=verl-7b\nif [[ $X == verl* ]]; then run yes; else run no; fi",
    "X=verl-7b\nif [[ ! $X == trl* ]]; then run yes; else run no; fi",
    "X=2\nif [ $X = 1 ]; then run a; elif [ $X = 2 ]; then run b; elif [ $X = 3 ]; then run c; else run d; fi",
    "X=4\nif [ $X = 1 ]; then run a; elif [ $X = 2 ]; then run b; else run d; fi",
    "X=1\nif [ $X = 1 ]; then if [ $X = 2 ]; then run a; else run b; fi; else run c; fi",
    "X=1\nif [ $X = 2 ]; then X=5; else Y=6; fi\nrun $X $Y",
    "case verl-7b in trl*) run a;; verl*) run b;; *) run c;; esac",
    "case oat in trl|oat) run a;; *) run c;; esac",
    "case other in trl|oat) run a;; *) run c;; esac\nrun after",
    "X=1; X+=2\nrun $X",
    'X=(a "b c" d)\nrun "${X[@]}"\nrun ${X[1]}\nrun ${X[2]} end',
    'X=(a\n  b\n  # c\n  d)\nX+=(e "f g")\nrun "${X[@]}" last',
    'X=""\nrun a ${X:-b} ${Y:-c d} "${Y:-c d}" ${X:+e} ${Y-f} end',
    "X=set\nrun ${X:-b} ${X:+e} ${X-f} ${X:=g} end",
    "X=Verl\nrun ${X,,} ${X^^}",
    'run \'a $X\' "b\'c" d\\ e "f\\"g\\$h"',
    'X="a b"\nrun $X "$X" c$X"d e"',
    "export X=1 Y=2\nrun $X $Y",
    "A=1 B=2 run c b",
    "run a \\\n  b \\\n  c",
    "run $(echo a) `echo b` end",
    "run a </dev/null b; run c",
    'start() { run --a $1 --b "$2"; }\nstart 5 "6 7"\nstart 8 9',
    'function start { run "$@" end; }\nstart a "b c"',
    "start() {\n  local X=$1\n  run $X\n}\nstart 3",
    "read -r -d '' X <<EOF\na b\nEOF\nrun $X",
    'Y=1\nread -r -d "" X <<EOF\na $Y\nEOF\nrun $X',
    "Y=1\nread -r -d '' X <<'EOF'\na $Y\nEOF\nrun $X",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_words_are_those_that_bash_gives(script):
    assert calls_that_are_read(script) == calls_in_bash(script)


@pytest.mark.parametrize("items", ["a b", '"a b" c', "1 2 3", "a"])
def test_a_loop_is_read_with_its_first_value(items):
    script = f'for X in {items}; do\n  run "$X" --n $X\ndone'
    assert calls_that_are_read(script) == calls_in_bash(script)[:1]
