"""Reading of Dockerfiles: variables, settings of each line, refused lines, and the files of the context."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.dockerfile.context import Context, lay_out, patterns
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, context_digest, instructions
from megaflow_hpc.environments.images.dockerfile.steps import Copy, RunStep
from megaflow_hpc.environments.images.dockerfile.words import VariableReference, expand, literal, shell_word
from megaflow_hpc.errors import ConfigError


def parse(tmp_path: Path, text: str, **build_args: str) -> Dockerfile:
    path = tmp_path / "Dockerfile"
    path.write_text(textwrap.dedent(text))
    return Dockerfile(path, build_args=build_args)


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A", "x y"),
        ("pre${A}post '$A' \"$A\"", "prex ypost $A x y"),
        (r"a\ b \$A \"", 'a b $A "'),
        ("${EMPTY:-d$A}|${EMPTY-d}|${A:+set}|${NONE:+set}|${NONE:-}", "dx y||set||"),
        ('K="a \\"b\\" c"', 'K=a "b" c'),
    ],
)
def test_variables_quotes_and_escapes_are_replaced_as_docker_does(text: str, expected: str) -> None:
    assert literal(expand(text, {"A": ["x y"], "EMPTY": []})) == expected


def test_in_a_here_document_escapes_are_removed_and_quotes_are_not() -> None:
    assert literal(expand("a\\$b \\W \"q\" '$A' \\\\", {"A": ["1"]}, quotes=False)) == "a$b W \"q\" '1' \\"


def test_a_variable_that_only_the_image_knows_stays_one_for_the_shell() -> None:
    found = expand("/opt/bin:$PATH", {})
    assert found == ["/opt/bin:", VariableReference("PATH")]
    assert shell_word(found) == '/opt/bin:"${PATH-}"'


def test_heredocs_are_taken_out_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    text = "FROM a\nRUN cat <<A <<-'B' && \\\n\n  echo '<<C'\none\nA\n\ttwo $X\n\tB\n"
    text += 'RUN echo $((1<<2)) "<<D"\nCOPY <<E /e\nE\n'
    (tmp_path / "Dockerfile").write_text(text)
    found = {each.start_line: each for each in instructions(tmp_path / "Dockerfile")}
    assert max(each.end_line for each in found.values()) == len(text.splitlines())
    assert [(each.name, each.content, each.expand) for each in found[2].heredocs] == [
        ("A", "one\n", True),
        ("B", "two $X\n", False),
    ]
    assert {line for line, each in found.items() if each.heredocs} == {2, 10}
    assert [each.original for each in found.values()][-2:] == ['RUN echo $((1<<2)) "<<D"', "COPY <<E /e"]
    steps = Dockerfile(tmp_path / "Dockerfile").last.steps
    assert [step.line for step in steps if isinstance(step, RunStep | Copy)] == [2, 9, 10]
    assert isinstance(steps[0], RunStep)
    assert steps[0].argv[-1] == "cat <<A <<-'B' &&   echo '<<C'\none\nA\ntwo $X\nB"


# --- settings of a line -----------------------------------------------------------------------------------------------


def test_directory_variables_user_and_shell_hold_from_their_line_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    found = parse(
        tmp_path,
        """\
        # syntax=docker/dockerfile:1
        ARG TAG=12
        FROM debian:${TAG} AS base
        ARG TAG
        ARG V=1
        ENV PATH=/opt/bin:$PATH NAME="x y"
        RUN echo first && \\
            # in between
            echo "$V"
        WORKDIR /srv
        COPY a.txt sub/
        RUN ["echo", "it's"]
        WORKDIR app
        SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
        USER agent
        RUN false | true
        FROM base
        CMD ["sh"]
        """,
    )
    runs = [step for step in found.last.steps if isinstance(step, RunStep)]
    assert [(run.workdir, run.user, run.argv[0]) for run in runs] == [
        (".", None, "/bin/sh"),
        ("/srv", None, "echo"),
        ("/srv/app", "agent", "/bin/bash"),
    ]
    assert runs[0].exports == {"TAG": "12", "V": "1"}
    assert (found.base, found.workdir, found.user) == ("debian:12", "/srv/app", "agent")
    assert found.environment == {"NAME": "x y"}  # only the image knows PATH
    copy = next(step for step in found.last.steps if isinstance(step, Copy))
    assert (copy.sources, copy.target, copy.into) == (["a.txt"], "/srv/sub/", True)
    assert [(line, name) for line, name, _ in found.ignored] == [(18, "CMD")]


def test_build_arguments_stand_in_for_defaults_and_env_beats_arg(tmp_path: Path) -> None:
    text = "ARG TAG=1\nFROM a:$TAG\nARG MODE=slow\nENV MODE=fixed\nARG WHO=me\nRUN true\n"
    text += "ARG TARGETARCH\nWORKDIR /$TARGETARCH\n"
    found = parse(tmp_path, text, TAG="2", WHO="you", MODE="fast")
    run = next(step for step in found.last.steps if isinstance(step, RunStep))
    assert (found.base, run.exports, found.environment) == ("a:2", {"WHO": "you"}, {"MODE": "fixed"})
    assert found.workdir in ("/amd64", "/arm64")
    assert context_digest(found) != context_digest(parse(tmp_path, text))


def test_the_last_of_arg_and_env_holds_and_a_stage_on_a_stage_has_its_arguments(tmp_path: Path) -> None:
    text = "FROM a AS one\nENV A=env B=env\nARG A=arg\nARG B\nENV C=$A\nFROM one\nRUN true\n"
    text += "ARG TARGETVARIANT\nWORKDIR /$A$TARGETVARIANT\n"
    found = parse(tmp_path, text, http_proxy="http://10.0.0.1:3128", unused="x")
    run = next(step for step in found.last.steps if isinstance(step, RunStep))
    assert run.exports == {"A": "arg", "http_proxy": "http://10.0.0.1:3128"}
    assert (found.environment, found.workdir) == ({"A": "env", "B": "env", "C": "arg"}, "/arg")


def test_the_values_of_one_env_see_what_was_before_it(tmp_path: Path) -> None:
    text = 'FROM a\nENV A=1 B="$A" PATH=/one:$PATH\nENV PATH=/two:$PATH WAS=$PATH\n'
    script = "\n".join([*parse(tmp_path, text).last.exports, 'echo "$A|$B|$PATH|$WAS"'])
    done = subprocess.run(["/bin/sh", "-c", script], env={"PATH": "/bin"}, capture_output=True, text=True, check=True)
    assert done.stdout == "1||/two:/one:/bin|/one:/bin\n"


def test_stages_that_nothing_is_copied_from_are_not_built(tmp_path: Path) -> None:
    found = parse(
        tmp_path,
        """\
        FROM one AS unused
        RUN true
        FROM two AS tools
        FROM three
        COPY --from=tools /bin/x /bin/
        COPY --from=org/image:4 /y /y
        """,
    )
    assert [stage.base for stage in found.needed] == ["two", "three"]
    assert found.bases == ["three", "two", "org/image:4"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "FROM a\nADD https://x.example/y /y\n",
            r"Dockerfile:2: ADD https://x\.example/y: addresses are not supported",
        ),
        ("FROM a\nRUN <<EOF\necho\n", r"Dockerfile:\d: the here-document <<EOF has no end"),
        ("FROM a\n\nSHELL bash\n", r"Dockerfile:3: SHELL bash; write SHELL \["),
        ("FROM a\nCOPY gone /x\n", r"Dockerfile:2: gone: no such file"),
        ("FROM a\nCOPY ../up /x\n", r"Dockerfile:2: \.\./up: outside of the build context"),
        (
            "FROM a\nCOPY Dockerfile Dockerfile /x\n",
            r"Dockerfile:2: COPY .*several sources need a target that ends with /",
        ),
        ("FROM a\nCOPY --chwon=x Dockerfile /x\n", r"Dockerfile:2: COPY --chwon is not supported"),
        ("FROM a\nRUN --mount=type=secret,id=k,required=true x\n", r"Dockerfile:2: RUN --mount=type=secret,required"),
        ("FROM a\nCOPY --from=b /d /x\nFROM c AS b\n", r"Dockerfile:3: FROM c AS b: a stage before copies from it"),
        ("FROM a\nCOPY --parents d/f /x\n", r"Dockerfile:2: COPY --parents is not supported"),
        ("FROM a\nRUN --network=none x\n", r"Dockerfile:2: RUN --network=none is not supported"),
        ("FROM a\nWORKDIR $WHERE\n", r"Dockerfile:2: \$WHERE is set neither by ARG nor by ENV"),
        ("FROM a\nENV A=${PATH:-x}\n", r"Dockerfile:2: .*only the base image knows PATH"),
        ("FROM a\nENV A=${B%x}\n", r"Dockerfile:2: '\$\{B%x\}' is not supported"),
        ("FROM a\nENV A='x\n", r"Dockerfile:2: .*a ' is not closed"),
        ("FROM a\nONBUILD RUN x\n", r"Dockerfile:2: ONBUILD is not supported"),
        ("FROM scratch\nCOPY Dockerfile /x\n", r"Dockerfile:1: FROM scratch: an image without a shell"),
        ("# escape=`\nFROM a\n", r"Dockerfile:1: escape=` is not supported"),
        ("RUN x\n", r"Dockerfile:1: RUN before FROM"),
        ("# nothing\n", r"Dockerfile: no FROM"),
    ],
)
def test_what_cannot_be_built_faithfully_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(tmp_path, text)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a\nRUN " + "x" * 10_000_000, r"Dockerfile: more than 524288 characters"),
        ("FROM a\nRUN " + "x" * 70_000, r"Dockerfile:2: a line of 70004 characters"),
        ("# syntax=a" + " " * 60_000 + "b\nFROM a\n", r"Dockerfile:1: a directive of 60011 characters"),
        ("FROM a\nRUN a\0b\n", r"Dockerfile:2: a NUL byte"),
        ("FROM a\nCMD " + "[" * 60_000, r"Dockerfile: brackets are nested too deeply"),
        ("FROM a\nENV A=" + "${B:-" * 10_000 + "}" * 10_000, r"Dockerfile:2: \$\{ is nested more than 32 deep"),
        ("FROM a\n" + "ENV A=b\n" * 20_000, r"Dockerfile: 20001 instructions; at most 2000"),
        ("FROM a\nARG" + "".join(f" a{i}=" for i in range(1001)), r"Dockerfile:2: more than 1000 arguments"),
        ("FROM a\nRUN " + "9" * 5000 + "<<E\nE\n", r"Dockerfile:2: Exceeds the limit"),
        ("FROM a\nRUN <<A\nA\nRUN x <<A <<B\nA\n", r"Dockerfile:4: the here-document <<B has no end; add a line B"),
        ("FROM a\nRUN <<A\n#!/bin/sh '\nA\n", r"Dockerfile:2: No closing quotation"),
        ("FROM a\nENV A=b c\n", r"Dockerfile:2: .*can't find = in \"c\". Must be of the form: name=value"),
        ("FROM a\nFETCH x\n", r"Dockerfile:2: unknown instruction: FETCH; correct it"),
        ("FROM a\nRUN --mount=type=cache,target=/x\n", r"Dockerfile:2: RUN without a command"),
        ("CMD x\nFROM a\n", r"Dockerfile:1: CMD before FROM"),
        ('FROM a\nCOPY ["it\'s", "/x"]\n', r"Dockerfile:2: \"it's\": a ' is not closed"),
        ("FROM a\nCOPY [x /y\n", r"Dockerfile:2: Invalid ignore pattern '\./\[x': syntax error in pattern; correct it"),
    ],
)
def test_hostile_text_is_refused_at_once(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(tmp_path, text)


@pytest.mark.timeout(30)
def test_long_but_honest_text_is_read(tmp_path: Path) -> None:
    text = (
        "\ufeff# syntax=x\nFROM a\nRUN x" + " \\\n  y" * 60_000 + "\nCOPY <<A /t\n" + ("z" * 60_000 + "\n") * 2 + "A\n"
    )
    run, copy = parse(tmp_path, text).last.steps
    assert isinstance(run, RunStep)
    assert run.argv[-1].count("y") == 60_000
    assert isinstance(copy, Copy)
    assert len(copy.texts["A"]) == 120_002
    (tmp_path / "Dockerfile").write_bytes(b"FROM a\nRUN caf\xe9\n")
    run = Dockerfile(tmp_path / "Dockerfile").last.steps[0]
    assert isinstance(run, RunStep)
    assert run.argv[-1] == "caf\udce9"


# --- the context ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "path", "ignored"),
    [
        (["*.log"], "a.log", True),
        (["*.log"], "sub/a.log", False),
        (["**/*.log"], "sub/deep/a.log", True),
        (["**/*.log"], "a.log", True),
        (["build"], "build/x/y", True),
        (["/build/"], "build/x", True),
        (["*", "!keep.txt"], "keep.txt", False),
        (["*", "!keep.txt"], "other.txt", True),
        (["docs", "!docs/*.md", "docs/secret.md"], "docs/a.md", False),
        (["docs", "!docs/*.md", "docs/secret.md"], "docs/secret.md", True),
        (["# comment", "", "a?c", "[xy].txt"], "abc", True),
        (["[^xy].txt"], "x.txt", False),
        (["[^xy].txt"], "z.txt", True),
        (["[!xy].txt"], "x.txt", True),  # Go's filepath.Match: only `^` negates
    ],
)
def test_dockerignore_lines_mean_what_they_mean_to_docker(lines: list[str], path: str, ignored: bool) -> None:
    assert patterns(lines)(path) is ignored


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ok\n[a\n", r"\.dockerignore:2: Invalid ignore pattern '\[a': syntax error in pattern; correct it"),
        ("!\n", r"\.dockerignore:1: Invalid ignore pattern '!'"),
        ("\n" * 100_000, r"\.dockerignore: more than 65536 characters"),
        ("**/**/**/**/**/**/**/**/a\n", r"\.dockerignore: .* has too many wildcards for 'b/b/"),
        ("**/*b*b*b*b*b*b/a\n", r"\.dockerignore: .* has too many wildcards for 'b/b/"),
    ],
)
def test_hostile_ignore_patterns_are_refused_at_once(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / ".dockerignore").write_text(lines)
    (tmp_path / ("b/" * 40) / ("b" * 200)).mkdir(parents=True)
    with pytest.raises(ConfigError, match=said):
        list(parse(tmp_path, "FROM a\nCOPY . /x\n").context.files("."))


def test_many_wildcards_are_no_trouble_in_ordinary_paths() -> None:
    path = "packages/some-library/src/components/__tests__/fixtures/deep/tree/a_foo_test.spec.py"
    assert patterns(["**/*foo*/**/*.py", "**/.*_cache/**", "**/*_foo_*/**"])(path) is False
    assert patterns(["**/*tests*/**/*foo*.py"])(path) is True


def test_a_file_that_the_user_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked/key").write_text("k")
    (tmp_path / "locked/key").chmod(0)
    dockerfile = parse(tmp_path, "FROM a\nCOPY locked /x\n")
    with pytest.raises(ConfigError, match=r"locked/key: cannot be read \(Permission denied\)"):
        context_digest(dockerfile)
    with pytest.raises(ConfigError, match="locked/key: cannot be read"):
        lay_out(dockerfile.context, ["locked"], tmp_path / "laid")


def test_an_images_key_follows_what_is_copied_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    text = "FROM a\nCOPY f /f\n"
    first = context_digest(parse(tmp_path, text))
    (tmp_path / "other").write_text("not copied")
    assert context_digest(parse(tmp_path, text)) == first
    assert context_digest(parse(tmp_path, text), base="another") != first
    (tmp_path / "f").chmod(0o755)
    executable = context_digest(parse(tmp_path, text))
    (tmp_path / "f").write_text("2")
    assert len({first, executable, context_digest(parse(tmp_path, text))}) == 3


def test_wildcards_stay_in_their_directory(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "sub/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert Context(tmp_path).find("*.py") == ["a.py"]
    assert Context(tmp_path).find("*/*.py") == ["sub/c.py"]
    assert Context(tmp_path).find(".") == ["."]
    assert Context(tmp_path).find("**/*.py") == ["sub/c.py"]
    assert Context(tmp_path).find("*.none") == []


def test_several_files_that_a_wildcard_finds_are_copied_as_one_is(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    copy, nothing = parse(tmp_path, "FROM a\nCOPY *.txt /e\nCOPY optional* /e/\n").last.steps
    assert isinstance(copy, Copy)
    assert isinstance(nothing, Copy)
    assert (copy.sources, copy.target, copy.into, nothing.sources) == (["a.txt", "b.txt"], "/e", False, [])


def test_a_copied_directory_is_as_it_was_but_for_what_is_left_out(tmp_path: Path) -> None:
    context = tmp_path / "context"
    for name in ("d/only.log", "d/ignored/x", "d/out/y", "d/sub/out/z", "d/one"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    (context / "d/two").hardlink_to(context / "d/one")
    (context / "d/link").symlink_to("one")
    (context / "d/empty").mkdir(mode=0o711)
    (context / ".dockerignore").write_text("**/*.log\nd/ignored/*\n")
    for path in (context / "d/link", context / "d/empty", context / "d/sub", context / "d"):
        os.utime(path, (10**9, 10**9), follow_symlinks=False)
    lay_out(Context(context), ["d", "d/empty"], tmp_path / "laid", exclude=["out"])
    laid = tmp_path / "laid/0/d"
    found = sorted(str(path.relative_to(laid)) for path in laid.rglob("*"))
    assert found == ["empty", "ignored", "link", "one", "sub", "sub/out", "sub/out/z", "two"]
    assert (laid / "one").samefile(laid / "two")
    assert {path.lstat().st_mtime for path in (laid, laid / "link", laid / "empty", laid / "sub")} == {10**9}
    assert os.listdir(tmp_path / "laid/1/empty") == []
