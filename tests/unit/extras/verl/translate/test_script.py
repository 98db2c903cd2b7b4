"""Launch scripts are read, not run: what they would hand to a program, and what cannot be known without that."""

from __future__ import annotations

import pytest

from scalerl.extras.verl.translate.script import read_script

MAIN = "python3 -m verl.trainer.main_ppo"


def arguments(text: str) -> list[str]:
    (command,) = read_script(text).commands
    return command.arguments


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{MAIN} a=1 b='x y' c=\"d\"", ["a=1", "b=x y", "c=d"]),
        (f"{MAIN} \\\n  a=1 \\\n  b=2", ["a=1", "b=2"]),
        (f"N=3\nM=$N\n{MAIN} a=$N b=${{M}} c=\"$N$M\" d='$N'", ["a=3", "b=3", "c=33", "d=$N"]),
        (f"N=${{N:-4}}\n{MAIN} a=$N", ["a=4"]),
        (f"N=2\nN=${{N:-4}}\n{MAIN} a=$((N * 1024 + 1))", ["a=2049"]),
        (f"A=2; B=$((A/2)) && {MAIN} a=$(( (A + B) * 2 ))", ["a=6"]),
        (f"ARGS=(\n  a=1  # one\n  'b=[x, y]'\n)\nARGS+=(c=3)\n{MAIN} \"${{ARGS[@]}}\" $@", ["a=1", "b=[x, y]", "c=3"]),
        (f'X="a=1 b=2"\n{MAIN} $X "$X"', ["a=1", "b=2", "a=1 b=2"]),
        (f"F=\"['$D/a','b']\"\n{MAIN} f=\"$F\"", ["f=['$D/a','b']"]),
        (f"export N=5\nreadonly M=6\n{MAIN} a=$N b=$M 2>&1 | tee log", ["a=5", "b=6"]),
        (f"V=1 PYTHONUNBUFFERED=1 {MAIN} a=1 > log.txt", ["a=1"]),
        (f"ray job submit --address=x -- {MAIN} a=1", ["a=1"]),
        (f"cat <<EOF > f\n{MAIN} wrong=1\nEOF\n{MAIN} a=1", ["a=1"]),
        (f"bash <<'EOF'\n{MAIN} a=1\nEOF\n", ["a=1"]),
        ("python verl/trainer/main_ppo.py a=1", ["a=1"]),
        ("python3 -m main_dapo a=1", ["a=1"]),
        (
            f"N=2\nsrun -N 1 --container-image=$C bash -c \"cd x && {MAIN} \\\n  a=$N b='[1, 2]'\" 2>&1 | tee log",
            ["a=2", "b=[1, 2]"],
        ),
        (f"export N=2\ndocker exec c bash -lc '{MAIN} a=$N'", ["a=2"]),
        (f'ssh $HEAD "export A=0 && {MAIN} a=1"', ["a=1"]),
        (f"# {MAIN} no=1\necho '{MAIN} no=2'\n{MAIN} a=1", ["a=1"]),
    ],
)
def test_arguments(script: str, expected: list[str]):
    assert arguments(script) == expected


@pytest.mark.parametrize(
    ("script", "kept", "note"),
    [
        (f"{MAIN} a=$(date +%Y)", ["a=$(date +%Y)"], "line 1: `$(date +%Y)` is a command, and not run"),
        (f"E=b-$(date +%Y)\n{MAIN} a=$E", ["a=b-$(date +%Y)"], "line 1: `$(date +%Y)` is a command, and not run"),
        (f"\n{MAIN} a=$HOME/x", ["a=$HOME/x"], "line 2: $HOME is not set in the script"),
        (f"N=${{N:-4}}\n{MAIN} a=$N", ["a=4"], "line 1: $N is not set in the script: its default '4' is taken"),
        (f"if [ -f x ]; then A=1; fi\n{MAIN} a=1", ["a=1"], "line 1: `if ... fi` is left out"),
        (f"case x in x) A=1;; esac\n{MAIN} a=1", ["a=1"], "line 1: `case ... esac` is left out"),
        (f"[ -z x ] && A=1\n{MAIN} a=$A", ["a=$A"], "line 1: what depends on the condition `[ -z x ]` is left out"),
        (f"let A=3\n{MAIN} a=1", ["a=1"], "line 1: `let A=3` is not read"),
        (f"for i in 1 2; do\nA=$i\ndone\n{MAIN} a=1", ["a=1"], "line 1: `for ... done` is left out"),
        (f"source env.sh\n{MAIN} a=1", ["a=1"], "line 1: `source env.sh` is not read"),
        (f"go() {{\n A=1\n}}\n{MAIN} a=1", ["a=1"], "line 1: the function go is left out"),
        (f"{MAIN} a=$((1 / 0))", ["a=$((1 / 0))"], "is not computed"),
    ],
)
def test_what_is_not_known_is_said_with_its_line(script: str, kept: list[str], note: str):
    launch_script = read_script(script)
    assert [command.arguments for command in launch_script.commands] == [kept]
    assert [text for text in launch_script.notes if note in text]


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    script = f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\nZ=$((__import__('os').system('touch {mark}')))\n"
    launch_script = read_script(f"{script}{MAIN} a=$X b=$Z")
    assert not mark.exists() and len(launch_script.commands) == 1 and launch_script.notes


def test_a_script_of_ordinary_text_ends():
    for text in ("", "((", "'", '"', "a=(", "${", "$(", "`", "case x in", "if", "<<EOF", "a\\"):
        assert read_script(text).commands == []
