"""Dockerfiles: how their lines are read, what is refused, and what the images built from them hold."""

from __future__ import annotations

import os
import subprocess
import tarfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megaflow_hpc.environments.builds import tree, workspace
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.context import Context, lay_out, patterns
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, context_digest
from megaflow_hpc.environments.images.dockerfile.reader import instructions
from megaflow_hpc.environments.images.dockerfile.steps import Copy, RunStep
from megaflow_hpc.environments.images.dockerfile.words import (
    VariableReference,
    expand,
    literal,
    shell_word,
)
from megaflow_hpc.environments.images.layered import layer_path, read_layered
from megaflow_hpc.environments.images.layers import listing
from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.environments.images.mapping import ImageMapping
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.files import remove_tree
from tests.support.builds import build, unpacked
from tests.support.image_trees import tree_of


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


def test_a_here_documents_escapes_are_removed_and_its_quotes_are_not() -> None:
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


# --- what holds at a line ---------------------------------------------------------------------------------------------


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
    assert found.environment == {"NAME": "x y"}  # what PATH is, only the image knows
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
        ("FROM a\nCOPY --parents ./d/./f /x\n", r"Dockerfile:2: --parents with .* is not supported"),
        ("FROM a\nCOPY --parents d/**/f /x\n", r"Dockerfile:2: --parents with .* is not supported"),
        ("FROM a AS b\nFROM a\nCOPY --from=b --parents /d /x\n", r"Dockerfile:3: --parents with .* is not supported"),
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


def test_a_link_out_of_the_context_is_refused(tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (tmp_path / "secret").write_text("s")
    (context / "link").symlink_to("../secret")
    with pytest.raises(ConfigError, match=r"Dockerfile:2: link: a link out of the build context"):
        parse(context, "FROM a\nCOPY link /x\n")


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


# --- a built image ----------------------------------------------------------------------------------------------------

RICH = r"""
# syntax=docker/dockerfile:1
ARG BASE=base
FROM ${BASE} AS tools
WORKDIR /out
RUN mkdir -p bin && printf '#!/bin/sh\necho tool\n' > bin/tool && chmod 750 bin/tool && ln -s tool bin/alias
RUN echo unwanted > /tmp/of-the-other-stage

FROM $BASE
ARG WHO=nobody
ARG GREETING="hello $WHO"
ENV LAYERED=/opt/bin:$PATH PLAIN="two  words" \
    QUOTED='$PLAIN'
ENV OLD style value
LABEL ignored=yes
RUN echo "1 $GREETING|$PLAIN|$QUOTED|$OLD" > /log && pwd >> /log
WORKDIR /srv
WORKDIR app
COPY one.txt sub ./
RUN cat one.txt >> /log; ls -A >> /log
# the order of COPY and RUN is the file's
COPY --chmod=600 two.txt renamed.txt
RUN stat -c '%n %a %U' renamed.txt >> /log && rm one.txt
COPY --chown=www-data:www-data ["with blank.txt", "sub", "/data/"]
RUN stat -c '%n %U:%G' /data "/data/with blank.txt" /data/nested/kept.secret >> /log
COPY *.cfg conf/
ADD archive.tar.gz /unpacked/
ADD --chmod=0755 script.sh /usr/local/bin/
COPY . /all/
COPY --parents sub/nested /parents/
COPY --exclude=*.cfg --exclude=sub . /part/
COPY --from=tools /out /from/
COPY --from=0 /out/bin/tool /tmp/kept
RUN ["/bin/sh", "-c", "echo \"json $0 $PWD\" >> /log", "it's"]
RUN <<EOF
echo "heredoc $PLAIN" >> /log
for i in 1 2; do
    echo "  line $i" >> /log
done
EOF
RUN cat <<'EOF' >> /log && echo "after $((1 << 2))" >> /log
literal $PLAIN
EOF
COPY <<ONE <<"TWO" /texts/
for $WHO
ONE
for $WHO
TWO
SHELL ["/bin/bash", "-c"]
RUN [[ -n "$BASH_VERSION" ]] && echo bash >> /log

RUN --mount=type=cache,target=/var/cache/pip --mount=type=bind,source=sub,target=/bound \
    ls /bound >> /log && echo x > /var/cache/pip/x
RUN ls -d /var/cache/pip /bound 2>/dev/null | wc -l >> /log
RUN chmod 666 /log && useradd --create-home --uid 1234 agent
USER agent
WORKDIR /home/agent
RUN echo "$(id -un) $(id -gn) $HOME $PWD" >> /log; ! touch /root/x 2>/dev/null && script.sh >> /log
USER 33:33
RUN id -u >> /log
ENTRYPOINT ["tool"]
"""

LOG = """\
1 hello me|two  words|$PLAIN|style value
/
1
nested
one.txt
three
renamed.txt 600 root
/data www-data:www-data
/data/with blank.txt www-data:www-data
/data/nested/kept.secret www-data:www-data
json it's /srv/app
heredoc two  words
  line 1
  line 2
literal $PLAIN
after 4
bash
nested
three
0
agent agent /home/agent /home/agent
script
33
"""


@pytest.fixture(scope="module")
def built(base_sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the image that the Dockerfile above makes, by a real build."""
    root = tmp_path_factory.mktemp("rich")
    context = root / "context"
    (context / "sub" / "nested").mkdir(parents=True)
    texts = {
        "Dockerfile": RICH,
        ".dockerignore": "*.log\n**/*.secret\n!sub/nested/kept.secret\n",
        "one.txt": "1\n",
        "two.txt": "2\n",
        "with blank.txt": "blank\n",
        "a.cfg": "a",
        "b.cfg": "b",
        "noise.log": "n",
        "script.sh": "#!/bin/sh\necho script\n",
        "sub/three": "3\n",
        "sub/nested/lost.secret": "s",
        "sub/nested/kept.secret": "k",
    }
    for name, text in texts.items():
        (context / name).write_text(text)
    with tarfile.open(context / "archive.tar.gz", "w:gz") as archive:
        archive.add(context / "sub" / "three", "in/archive")
    images = Images(ImageStore(root / "store"), builder=Builder())
    dockerfile = Dockerfile(context / "Dockerfile", build_args={"WHO": "me"})
    before = set(os.listdir("/tmp"))
    path = images.resolve_dockerfile(dockerfile, ImageMapping({"base": str(base_sif)}, root))
    assert images.resolve_dockerfile(dockerfile, ImageMapping({"base": str(base_sif)}, root)) == path
    assert not {"kept", "of-the-other-stage"} & (set(os.listdir("/tmp")) - before)
    tree = unpacked(path, root / "tree")
    yield tree
    remove_tree(tree)


@pytest.mark.slow
def test_a_built_image_ran_every_step_in_its_order_directory_shell_and_user(built: Path) -> None:
    assert (built / "log").read_text() == LOG


def test_a_built_image_holds_what_was_copied_where_and_as_it_was_asked(built: Path) -> None:
    def text(path: str) -> str:
        return (built / path).read_text()

    assert not (built / "srv/app/one.txt").exists()
    assert text("srv/app/three") == "3\n"
    assert text("srv/app/renamed.txt") == "2\n"
    assert sorted(os.listdir(built / "data")) == ["nested", "three", "with blank.txt"]
    assert sorted(os.listdir(built / "srv/app/conf")) == ["a.cfg", "b.cfg"]
    assert text("unpacked/in/archive") == "3\n"
    assert os.access(built / "usr/local/bin/script.sh", os.X_OK)
    assert text("texts/ONE") == "for me\n"
    assert text("texts/TWO") == "for $WHO\n"
    assert not (built / "all/noise.log").exists()
    assert (built / "parents/sub/nested/kept.secret").exists()
    assert sorted(os.listdir(built / "part")) == sorted(set(os.listdir(built / "all")) - {"a.cfg", "b.cfg", "sub"})
    assert os.listdir(built / "all/sub/nested") == ["kept.secret"]
    assert (built / "from/bin/tool").stat().st_mode & 0o777 == 0o750
    assert os.readlink(built / "from/bin/alias") == "tool"
    assert text("tmp/kept").endswith("echo tool\n")
    assert not (built / "tmp/of-the-other-stage").exists()
    for left in (".megaflow-from", ".megaflow-build/steps", "root/x", "bound", "var/cache/pip"):
        assert not (built / left).exists(), left


def test_a_built_image_sets_its_variables_over_those_of_its_base(built: Path) -> None:
    settings = built / ".singularity.d" / "env"
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            f'. {settings}/90-environment.sh; . {settings}/92-megaflow.sh; echo "$LAYERED|$PLAIN|$QUOTED|$OLD|$LC_ALL"',
        ],
        env={"PATH": "/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "/opt/bin:/bin|two  words|$PLAIN|style value|C.UTF-8\n"


def test_a_step_that_fails_names_its_line(small_rootfs: str, tmp_path: Path) -> None:
    dockerfile = parse(tmp_path, "FROM base\nRUN true\n\nRUN echo trying && \\\n  exit 7\nRUN true\n")
    said = r"Dockerfile: the build failed at line 4(.|\n)*trying(.|\n)*Dockerfile:4: exit status 7"
    with pytest.raises(SiteError, match=said):
        Images(ImageStore(tmp_path / "store"), builder=Builder()).resolve_dockerfile(
            dockerfile, ImageMapping({"base": small_rootfs}, tmp_path)
        )
    assert list((tmp_path / "store" / "work").glob("*/")) == []


@pytest.mark.slow
def test_a_build_on_an_image_begins_in_its_directory_and_makes_no_step_twice(base_sif: Path, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    said: list[str] = []
    bases = {"base": str(base_sif)}

    def made(name: str, text: str) -> Path:
        context = tmp_path / name
        context.mkdir()
        (context / "f").write_text(name)
        (context / "Dockerfile").write_text(text)
        images = Images(store, builder=Builder())
        images.say = said.append
        dockerfile = Dockerfile(context / "Dockerfile")
        path = images.resolve_dockerfile(dockerfile, ImageMapping(bases, tmp_path))
        bases[name] = str(path)
        return path

    made("first", "FROM base\nENV A=1\nWORKDIR /w\nRUN echo made > made\n")
    second = made("second", "FROM first\nENV B=$A-2\nCOPY f .\nWORKDIR sub\nRUN echo $B > ../b; pwd > pwd\n")
    assert [line.partition(":")[0].rpartition("/")[0] for line in said].count(str(tmp_path / "first")) == 2
    image = read_layered(second)
    assert (image.workdir, image.settings.splitlines()[0]) == ("/w/sub", "export A=1")
    view = LayerView([listing.of_blob(layer_path(second, layer.digest)) for layer in reversed(image.layers)])
    found = {name: view.read(f"w/{name}").decode().strip() for name in ("made", "f", "b", "sub/pwd")}
    assert found == {"made": "made", "f": "second", "b": "1-2", "sub/pwd": "/w/sub"}
    said.clear()
    third = made("third", "FROM first\nENV B=$A-2\nCOPY f .\nWORKDIR sub\nRUN echo $B > ../b; pwd > pwd\n")
    assert third != second
    assert not any(":1: " in line or "first" in line for line in said)
    said.clear()
    (tmp_path / "third" / "Dockerfile").touch()
    again = Images(ImageStore(tmp_path / "store"), builder=Builder())
    again.say = said.append
    assert (
        again.resolve_dockerfile(Dockerfile(tmp_path / "third" / "Dockerfile"), ImageMapping(bases, tmp_path)) == third
    )
    assert said == []


def test_a_default_that_a_base_image_might_know_better_is_told(small_rootfs: str, tmp_path: Path) -> None:
    images, said = Images(ImageStore(tmp_path / "store"), builder=Builder()), list[str]()
    images.say = said.append
    text = "FROM base\nARG OURS\nENV MADE=${OURS:-1} OPEN=${THEIRS-2}\nWORKDIR /${MADE:-x}\nRUN echo ${SHELLS:-own}\n"
    text += "ENV QUOTED='${A:-x}' ESCAPED=\\${B:-x}\n"  # here is no variable
    dockerfile = parse(tmp_path, text)
    assert [name for _, name in dockerfile.unset] == ["OURS", "THEIRS"]
    images.resolve_dockerfile(dockerfile, ImageMapping({"base": small_rootfs}, tmp_path))
    assert said[:2] == [
        f"{dockerfile.path}:3: other than in Docker: ${name} counts as unset, whatever the base image sets"
        for name in ("OURS", "THEIRS")
    ]


def test_without_an_overlay_a_chain_is_laid_out_once_for_all_its_steps(
    small_rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay")
    laid: list[str] = []

    async def counted(prefix: Sequence[str], *words: str, request: object = None) -> str:
        laid.extend(words[2:] if words[0] == "lay" else ())
        return await tree.run_tree(prefix, *words, request=request)

    monkeypatch.setattr(workspace, "run_tree", counted)
    steps = "RUN echo 1 > /one\nRUN rm /one && echo 2 > /two\n"
    steps += "RUN mkdir /d && cat /two > /d/two && rm /two\nRUN ls /d / > /seen\n"
    text = (
        f"FROM base AS first\n{steps}FROM first\nRUN echo 3 > /d/three\nCOPY --from=first /d /e\nRUN ls /e >> /seen\n"
    )
    image = build(tmp_path / "context", text, {"base": small_rootfs})
    found = tree_of(image)
    assert {"/d/two", "/d/three", "/e/two", "/seen"} <= found.keys()
    assert not {"/one", "/two", "/e/three"} & found.keys()
    assert len(laid) == len(set(laid)) == 7, laid  # the base, and six layers
