"""What words the commands of a shell script get: quotes, variables, arrays, branches, loops, functions."""

import pytest

from kl_comedy.errors import UserError
from kl_comedy.peers.launch_shell import Interpreter
from kl_comedy.peers.launch_shell_syntax import MAX_UNCLOSED


def commands_of(script):
    """Every command's words, and the kind of the origin of the last one."""
    commands = []

    def command(words):
        commands.append(([word.text for word in words], words[-1].origin.kind))

    Interpreter(command, lambda words, text: None, lambda text: text).script(script)
    return commands


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('X="--a 1 --b"\nrun $X c', ["run", "--a", "1", "--b", "c"]),
        ('X="--a 1 --b"\nrun "$X" c', ["run", "--a 1 --b", "c"]),
        ('X=(--a 1)\nX+=(--b)\nrun "${X[@]}"', ["run", "--a", "1", "--b"]),
        ("X=(--a 1)\nrun ${X[0]}", ["run", "--a"]),
        ("run ${X:-0.01} ${Y:+--on} ${Z:-$W}", ["run", "0.01", "$W"]),
        ('X="$X --a"\nX+=" --b"\nrun $X', ["run", "$X", "--a", "--b"]),
        ("read -r -d '' X <<EOF\nmodule \\\n --a 1\nEOF\nrun $X", ["run", "module", "--a", "1"]),
        ("start() { run --a $1; }\nstart 5", ["run", "--a", "5"]),
        ("A=1 run 'x y' # --b", ["run", "x y"]),
        ("run a \\\n  # --b \\\n  c", ["run", "a", "c"]),
        (': "${X:=5}"\nrun $X', ["run", "5"]),
        ("declare -A X=([a]=1 [b]=2)\nX[a]=3\nrun ${X[a]} ${X[b]}", ["run", "3", "2"]),
        ("X=(1 2)\nI=1\nrun ${X[$I]} ${X[I]}", ["run", "2", "2"]),
        ("X=(a)\n[ 1 = 2 ] && X+=(b)\n[[ 1 == 1 ]] || X+=(c)\nrun ${X[@]}", ["run", "a"]),
        (
            "X=a.b.c\nrun ${X##*.} ${X#*.} ${X%.*} ${X%%.*} ${X/a/x} ${X//./-}",
            ["run", "c", "b.c", "a.b", "a", "x.b.c", "a-b-c"],
        ),
        ("run a $([ 1 = 1 ] && echo '--b 2') $([ 1 = 2 ] && echo '--c')", ["run", "a", "--b", "2"]),
        ("X=$(compute a b)\nrun $X", ["run", "$(compute a b)"]),
        ('X=1\nwhile [ $# -gt 0 ]; do case $1 in --x) X="$2";; esac; shift; done\nrun $X', ["run", "1"]),
        ('X=1\nwhile getopts "x:" o; do X=$OPTARG; done\nrun $X', ["run", "1"]),
        ('X=1\nif [ -n "$1" ]; then X=$1; fi\nif [ $# -gt 0 ]; then X=$1; fi\nrun $X', ["run", "1"]),
    ],
)
def test_a_command_gets_the_words_that_the_shell_would_give_it(script, words):
    assert commands_of(script)[-1] == (words, "certain")


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[ "$X" = "on" ]', True),
        ('[[ "$X" != "on" ]]', False),
        ("[[ $X == o* ]]", True),
        ('[ -z "$X" ]', False),
        ("[ 3 -gt 2 ]", True),
        ("[ ! $X = on ]", False),
        ('[ "$X" = on ] && [ 1 = 2 ]', False),
        ('[[ "$X" == on && 1 -lt 2 ]]', True),
        ('[[ "$X" == off || 1 -lt 2 ]]', True),
        ("[ -f file ] && [ 1 = 2 ]", False),
        ("[ -f file ] || [ 1 = 1 ]", True),
        ("(( 3 > 2 ))", True),
        ("(( N > 2 ))", False),
        ("[[ $X =~ n ]]", True),
        ("[[ $X =~ (n+)+$ ]]", True),
        ("[ -f file ]", True),
        ('[ "$1" = "on" ]', True),
    ],
    ids=[
        "equal",
        "unequal",
        "a pattern",
        "empty",
        "numbers",
        "not",
        "false and",
        "and",
        "or",
        "unknown and false",
        "unknown or true",
        "arithmetic",
        "a variable",
        "contains",
        "unknown: a pattern",
        "unknown: a file",
        "unknown: an argument",
    ],
)
def test_a_condition_is_decided_where_its_sides_are_known_and_else_its_first_branch_is_taken(condition, taken):
    first, second = commands_of(f"X=on\nN=1\nif {condition}; then\n  run first\nelse\n  run second\nfi\n")
    assert first == (["run", "first"], "branch" if taken else "skipped")
    assert second == (["run", "second"], "skipped" if taken else "branch")


@pytest.mark.parametrize(
    ("condition", "kinds"),
    [("-f x", ["branch", "skipped"]), ("a = b", ["branch", "skipped"]), ("a = a", ["skipped", "branch"])],
    ids=["unknown", "false", "true"],
)
def test_a_value_of_an_arm_whose_condition_is_not_known_decides_nothing(condition, kinds):
    script = f'if [ {condition} ]; then R=""; else R=0; fi\nif [ "$R" = "0" ]; then run 1; else run 2; fi\n'
    assert [kind for words, kind in commands_of(script) if words[0] == "run"] == kinds


def test_what_follows_a_test_in_a_list_is_a_branch():
    script = "[ -f x ] && run 1 && run 2 || run 3\n[ 1 = 1 ] || run 4\ncd x && run 5\n"
    kinds = [kind for words, kind in commands_of(script) if words[0] == "run"]
    assert kinds == ["branch", "branch", "skipped", "skipped", "certain"]


def test_an_arm_of_a_case_is_chosen_by_its_pattern():
    kinds = [kind for _, kind in commands_of("X=b\ncase $X in\n a) run 1 ;;\n b|c) run 2 ;;\n *) run 3 ;;\nesac\n")]
    assert kinds == ["skipped", "branch", "skipped"]


def test_conditions_after_the_arm_that_is_taken_are_not_run():
    script = "X=1\nif check --a; then run 1\nelif check --b; then run 2\nfi\n"
    assert [words for words, _ in commands_of(script)] == [["check", "--a"], ["run", "1"], ["run", "2"]]


def test_conditions_of_arms_that_are_not_taken_are_run_up_to_the_taken_one():
    script = "if false; then run 1\nelif check --b; then run 2\nelif check --c; then run 3\nfi\n"
    assert [words for words, _ in commands_of(script)] == [["run", "1"], ["check", "--b"], ["run", "2"], ["run", "3"]]


def test_what_a_branch_that_is_not_taken_assigns_is_forgotten():
    assert commands_of("X=1\nif false; then X=2; fi\nrun $X")[-1] == (["run", "1"], "certain")


def test_a_function_of_the_script_has_arguments():
    script = 'f() { if [ -n "$1" ]; then X=$1; fi; }\nX=1\nf 2\nrun $X'
    assert commands_of(script)[-1] == (["run", "2"], "branch")


def test_a_loop_runs_with_its_first_value():
    assert commands_of("for x in 1 2; do run --a $x; done") == [(["run", "--a", "1"], "loop")]


@pytest.mark.parametrize(
    "script", ["a\x0bb", "\x85", "run \u2028x", "$", '"', "'", "`", "${", "$(", "case", "if", "f()"]
)
def test_what_is_no_shell_comes_to_an_end(script):
    commands_of(script)


def test_many_brackets_that_nothing_closes_are_refused():
    with pytest.raises(UserError, match="brackets that nothing closes"):
        commands_of("$(\n" * (MAX_UNCLOSED + 1))


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "NODE_RANK", "RANK"])
def test_each_arm_on_the_number_of_a_process_acts(variable):
    script = f"if [ ${{{variable}:-0}} = 1 ]; then\n run --beta 0.1\nelse\n wait_for_it\nfi"
    kinds = {words[0]: kind for words, kind in commands_of(script)}
    assert kinds == {"run": "branch", "wait_for_it": "branch"}


def test_an_arm_on_another_variable_that_is_not_taken_is_skipped():
    script = "if [ ${MODE:-0} = 1 ]; then\n run --beta 0.1\nelse\n wait_for_it\nfi"
    kinds = {words[0]: kind for words, kind in commands_of(script)}
    assert kinds["run"] == "skipped"
