"""Images from a real registry, and registries that are broken, closed or hostile."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from megaflow_hpc.environments.images.registry import client
from megaflow_hpc.environments.images.registry.client import Reference
from megaflow_hpc.environments.images.registry.credentials import find_credentials
from megaflow_hpc.environments.images.registry.image import RemoteImage, fetch
from megaflow_hpc.environments.images.sources import Registries
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host import apptainer
from tests.support.places import ROOT
from tests.support.registries import (
    CONFIG,
    INDEX,
    LAYER,
    MANIFEST,
    Answer,
    Front,
    Layer,
    Registry,
    digest_of,
    endless,
    front,
    layer,
    noise,
    registry_server,
    says,
)
from tests.support.waiting import until

USER, PASSWORD = "ada", "open sesame"
HTPASSWD = f"{USER}:$2b$04$z8mf3hz9jb0GP6ygxdyQ5.utr7POaeTunS2ZOE/41QkoufQjWgtte\n"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Shelf:
    """Stands in for a store: keeps complete blobs by digest."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.told: list[tuple[int, int]] = []

    def take(self, digest: str, chunks: Iterable[bytes]) -> None:
        self.kept[digest] = b"".join(chunks)

    def fetch(self, reference: Reference) -> RemoteImage:
        return fetch(reference, self.kept.__contains__, self.take, lambda done, total: self.told.append((done, total)))


def reference(server: Registry | Front, path: str) -> Reference:
    return Reference.parse(server.address, path, plain=True)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hides the user's credentials and shortens pauses."""
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG", "APPTAINER_CONFIGDIR"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    return home


# --- a real registry --------------------------------------------------------------------------------------------------


def test_a_layer_is_taken_once_whatever_images_share_it(registry: Registry, between: Front) -> None:
    """Like SWE-bench: one base, environments on it, instances on those."""
    base = layer({"etc/base": noise("base")})
    shelf, pushed = Shelf(), [base]
    for environment in range(2):
        installed = layer({f"opt/env{environment}": noise(f"env{environment}")})
        registry.push(f"sweb.env.{environment}", "latest", [base, installed])
        pushed.append(installed)
        for instance in range(3):
            name = f"{environment}-{instance}"
            source = layer({"testbed/source.py": name.encode()})
            registry.push(f"sweb.eval.{name}", "latest", [base, installed, source], WorkingDir="/testbed")
            pushed.append(source)
            image = shelf.fetch(reference(between, f"sweb.eval.{name}"))
            assert [found.digest for found in image.layers] == [base.digest, installed.digest, source.digest]
    assert shelf.kept == {each.digest: each.blob for each in pushed}
    asked = [digest for digest in between.blobs() if digest in shelf.kept]
    assert sorted(asked) == sorted(shelf.kept)  # each once
    before = len(between.asked)
    image = shelf.fetch(reference(between, "sweb.env.1"))
    assert [found.digest for found in image.layers] == [base.digest, pushed[5].digest]
    assert len(between.asked) - before == 2  # a manifest and a configuration


def test_an_image_says_what_it_is(registry: Registry) -> None:
    layers = [layer({"a": b"1"}, "gzip"), layer({"b": b"2"}, "zstd"), layer({"c": b"3"}, "")]
    described = registry.push(
        "team/tools", "1.0", layers, Env=["PATH=/opt/bin:/bin", "EMPTY="], WorkingDir="/work", User="1000:100"
    )
    shelf = Shelf()
    for path in ("team/tools:1.0", f"team/tools@{described['digest']}", f"team/tools:other@{described['digest']}"):
        image = shelf.fetch(reference(registry, path))
        assert (image.env, image.workdir, image.user) == (("PATH=/opt/bin:/bin", "EMPTY="), "/work", "1000:100")
        assert [each.digest for each in image.layers] == [each.digest for each in layers]
        assert [each.bytes for each in image.layers] == [len(each.blob) for each in layers]
    assert shelf.kept == {each.digest: each.blob for each in layers}
    total = sum(len(each.blob) for each in layers)
    assert (shelf.told[0], shelf.told[-1]) == ((0, total), (total, total))


def test_an_image_without_settings_and_with_one_layer_twice(registry: Registry, between: Front) -> None:
    once = layer({"a": b"once"})
    registry.push("bare", "1", [once, once])
    image = Shelf().fetch(reference(between, "bare:1"))
    assert (image.env, image.workdir, image.user) == ((), "", "")
    assert [each.digest for each in image.layers] == [once.digest, once.digest]
    assert between.blobs().count(once.digest) == 1


def test_of_an_index_this_machines_image_is_taken(registry: Registry) -> None:
    """The index also lists build attestations, as buildx pushes them."""
    right = layer({"amd64": b""})
    described = [
        registry.push("index", name, [content], architecture=name) | {"platform": {"architecture": name, "os": "linux"}}
        for name, content in (("arm64", layer({"arm64": b""})), ("amd64", right))
    ]
    described[0]["platform"]["variant"] = "v8"
    attestation = registry.push("index", "attestation", [layer({"x": b""})])
    attestation["platform"] = {"architecture": "unknown", "os": "unknown"}
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [attestation, *described]}
    registry.push_manifest("index", "all", index)
    image = Shelf().fetch(reference(registry, "index:all"))
    assert [each.digest for each in image.layers] == [right.digest]

    registry.push_manifest("index", "arm", index | {"manifests": [attestation, described[0]]})
    with pytest.raises(SiteError, match=r"index:arm: no image for linux/amd64; there are linux/arm64$"):
        Shelf().fetch(reference(registry, "index:arm"))
    with pytest.raises(SiteError, match=r"an image for 'linux/arm64', but this machine is linux/amd64"):
        Shelf().fetch(reference(registry, "index:arm64"))


def test_a_mirror_is_asked_in_a_registrys_place(registry: Registry, between: Front) -> None:
    registry.push("hub/library/tiny", "1", [layer({"a": b"tiny"})])
    registries = Registries({"docker.io": f"http://{between.address}/hub"})
    assert len(Shelf().fetch(registries.reference("docker://tiny:1")).layers) == 1
    assert between.asked[0][0] == "/v2/hub/library/tiny/manifests/1"
    assert Registries({}).reference("docker://tiny").url == "https://registry-1.docker.io/v2/library/tiny"


def test_what_is_not_there_is_said(registry: Registry) -> None:
    registry.push("there", "1", [layer({"a": b""})])
    with pytest.raises(SiteError, match=r"there:2: not found in the registry: manifests/2: 404 \(MANIFEST_UNKNOWN"):
        Shelf().fetch(reference(registry, "there:2"))
    with pytest.raises(SiteError, match=r"nowhere:latest: not found in the registry"):
        Shelf().fetch(reference(registry, "nowhere"))
    with pytest.raises(SiteError, match=r"127.0.0.1:1 cannot be reached: .*refused"):
        Shelf().fetch(Reference("127.0.0.1:1", "x", plain=True))


NO_NAMES = ["../../x", "a/../b", "A", "a:t/x", "a:t?x=1", "a#b", "a/", "a//b", "a%2fb", "", "a b", "a:t\r\nHost: x"]
NO_VERSIONS = [f"a:{129 * 't'}", "a@sha256:0", "a@md5:0", "a@sha256:../../etc", f"a@sha256:{64 * 'G'}"]


@pytest.mark.parametrize("path", NO_NAMES + NO_VERSIONS)
def test_a_name_that_could_lead_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a "):
        Reference.parse("docker.io", path)
    with pytest.raises(ConfigError, match=r"is not a registry's host"):
        Reference.parse("evil.org/x?", "a")


# --- authorization ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that requires a user and a password."""
    folder = tmp_path_factory.mktemp("closed")
    (folder / "htpasswd").write_text(HTPASSWD)
    auth = {"htpasswd": {"realm": "closed", "path": str(folder / "htpasswd")}}
    with registry_server(registry_program, folder, auth) as found:
        found.authorization = BASIC
        found.push("secret", "1", [layer({"a": b"secret"})])
        yield found


def test_apptainers_login_is_used(closed: Registry, home: Path) -> None:
    with front(closed.address) as between:
        with pytest.raises(
            SiteError, match=rf"requires a login; to log in: apptainer registry login .*{between.address}"
        ):
            Shelf().fetch(reference(between, "secret:1"))
        login = [apptainer.find_apptainer(), "registry", "login", "--username", USER, "--password-stdin"]
        subprocess.run([*login, f"docker://{between.address}"], input=PASSWORD.encode(), check=True, timeout=60)
        between.asked.clear()
        assert len(Shelf().fetch(reference(between, "secret:1")).layers) == 1
        assert [asked[1] for asked in between.asked] == [None, BASIC, BASIC, BASIC]


@pytest.mark.parametrize("place", ["REGISTRY_AUTH_FILE", ".docker/config.json", ".config/containers/auth.json"])
def test_credentials_of_other_clients_are_found(
    closed: Registry, home: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = home / place
    if place == "REGISTRY_AUTH_FILE":
        monkeypatch.setenv(place, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"auths": {"other.org": {"auth": "eDp5"}, closed.address: {"auth": BASIC[6:]}}}))
    assert len(Shelf().fetch(reference(closed, "secret:1")).layers) == 1
    path.write_text(json.dumps({"auths": {closed.address: {"username": USER, "password": "wrong"}}}))
    with pytest.raises(SiteError, match=r"access denied, or not found: 401 \(UNAUTHORIZED") as failed:
        Shelf().fetch(reference(closed, "secret:1"))
    assert "wrong" not in str(failed.value)


def test_a_credential_helper_is_asked(closed: Registry, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = home / "bin" / "docker-credential-vault"
    helper.parent.mkdir()
    helper.write_text(
        f'#!/bin/sh\n[ "$1" = get ] && [ "$(cat)" = {closed.address} ] || exit 1\n'
        f'echo \'{{"ServerURL": "x", "Username": "{USER}", "Secret": "{PASSWORD}"}}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    (home / ".docker").mkdir()
    known = home / ".docker" / "config.json"
    for config in ({"credHelpers": {closed.address: "vault"}}, {"credsStore": "vault"}):
        known.write_text(json.dumps({"auths": {closed.address: {}}, **config}))
        assert len(Shelf().fetch(reference(closed, "secret:1")).layers) == 1
    for name in ("../bin/docker-credential-vault", "absent", "vault; touch /tmp/x"):
        known.write_text(json.dumps({"credsStore": name}))
        assert find_credentials(closed.address, "secret") is None


def test_what_a_credential_file_may_hold(home: Path) -> None:
    (home / ".docker").mkdir()
    known = home / ".docker" / "config.json"
    hub = {"auth": base64.b64encode(b"hub:pass:word").decode()}
    known.write_text(
        json.dumps({"auths": {
            "https://index.docker.io/v1/": hub, "ghcr.io": {"auth": "", "identitytoken": "refresh"},
            "quay.io/team": {"auth": base64.b64encode(b"team:1").decode()}, "broken.io": {"auth": "!"},
        }})
    )  # fmt: skip
    found = find_credentials("docker.io", "library/debian")
    assert found is not None
    assert (found.user, found.password) == ("hub", "pass:word")
    assert "pass:word" not in repr(found)
    found = find_credentials("ghcr.io", "a")
    assert found is not None
    assert (found.user, found.identity_token) == ("", "refresh")
    assert find_credentials("quay.io", "team/x") is not None
    assert find_credentials("quay.io", "teams/x") is None
    assert find_credentials("broken.io", "x") is None
    known.write_text("[]")
    assert find_credentials("ghcr.io", "a") is None


def certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A self-signed certificate of 127.0.0.1 for today."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lab")])
    today = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(today - datetime.timedelta(1)).not_valid_after(today + datetime.timedelta(1))
    own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    return builder.add_extension(own, critical=False).sign(key, hashes.SHA256())


def test_certificates_are_checked(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.push("by/tls", "1", [layer({"a": b""})])
    key = ec.generate_private_key(ec.SECP256R1())
    own = certificate(key).public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (tmp_path / "own").write_bytes(private + own)
    (tmp_path / "bundle").write_bytes(own)
    with front(registry.address, tmp_path / "own") as between:
        asked = Reference.parse(between.address, "by/tls:1")
        with pytest.raises(SiteError, match=r"127.0.0.1:\d+: .*certificate.*, name its bundle in SSL_CERT_FILE"):
            Shelf().fetch(asked)
        assert between.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "bundle"))
        assert len(Shelf().fetch(asked).layers) == 1
        between.rules["manifests/1"] = says(307, Location=f"http://{registry.address}/v2/by/tls/manifests/1")
        with pytest.raises(SiteError, match=r"redirects 'http://.*', which is not https"):
            Shelf().fetch(asked)


class Tokens:
    """A token server that follows the registry's specification and gives tokens for the password."""

    def __init__(self, folder: Path) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = certificate(self.key)
        self.bundle = folder / "bundle.pem"
        self.bundle.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        self.asked: list[tuple[str, str | None, bytes]] = []

    def token(self, repository: str, *actions: str) -> str:
        der = base64.b64encode(self.certificate.public_bytes(serialization.Encoding.DER)).decode()
        now = int(time.time())
        claims = {"iss": "tokens", "aud": "lab", "sub": USER, "exp": now + 300, "nbf": now - 60, "iat": now, "jti": "1"}
        claims["access"] = [{"type": "repository", "name": repository, "actions": actions}]
        signed = b".".join(map(_encoded, ({"typ": "JWT", "alg": "ES256", "x5c": [der]}, claims)))
        pair = decode_dss_signature(self.key.sign(signed, ec.ECDSA(hashes.SHA256())))
        signature = b"".join(number.to_bytes(32, "big") for number in pair)
        return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        authorization = handler.headers.get("Authorization")
        self.asked.append((handler.path, authorization, body))
        form = urllib.parse.parse_qs(body.decode() or urllib.parse.urlsplit(handler.path).query)
        if authorization == BASIC or form.get("refresh_token") == ["identity"]:
            _, repository, actions = form["scope"][0].split(":")
            answer = json.dumps({"access_token": self.token(repository, *actions.split(","))}).encode()
            return says(200, answer)(handler)
        return says(401, b"{}")(handler)


def _encoded(value: object) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")


@pytest.mark.parametrize("kind", ["password", "identity token"])
def test_a_token_server_gets_the_credentials_and_the_registry_the_token(
    registry_program: Path, tmp_path: Path, home: Path, kind: str
) -> None:
    tokens = Tokens(tmp_path)
    with front() as server:
        server.rules[""] = tokens.answer
        auth = {"realm": f"http://{server.address}/token", "service": "lab", "issuer": "tokens"}
        auth["rootcertbundle"] = str(tokens.bundle)
        with registry_server(registry_program, tmp_path / "registry", {"token": auth}) as behind:
            behind.authorization = f"Bearer {tokens.token('team/x', 'pull', 'push')}"
            behind.push("team/x", "1", [layer({"a": b"x"})])
            with front(behind.address) as between:
                with pytest.raises(
                    SiteError, match=r"127.0.0.1 issued no token without credentials \(401\); to log in"
                ):
                    Shelf().fetch(reference(between, "team/x:1"))
                entry = {"auth": BASIC[6:]} if kind == "password" else {"identitytoken": "identity"}
                (home / ".docker").mkdir()
                (home / ".docker" / "config.json").write_text(json.dumps({"auths": {between.address: entry}}))
                tokens.asked.clear()
                between.asked.clear()
                assert len(Shelf().fetch(reference(between, "team/x:1")).layers) == 1
                assert len(tokens.asked) == 1  # one token for one image
                path, authorization, body = tokens.asked[0]
                if kind == "password":
                    assert (authorization, body) == (BASIC, b"")
                    assert path == "/token?scope=repository%3Ateam%2Fx%3Apull&service=lab"
                else:
                    assert (path, authorization) == ("/token", None)
                    assert b"grant_type=refresh_token" in body
                assert between.asked[0][1] is None
                assert {str(asked[1]).partition(" ")[0] for asked in between.asked[1:]} == {"Bearer"}


def test_a_redirection_to_another_host_carries_no_credentials(closed: Registry, home: Path) -> None:
    """The other host is like an object store behind a registry."""
    blob = layer({"a": b"secret"}).blob
    (home / ".docker").mkdir()
    with front(closed.address) as between, front() as elsewhere:
        elsewhere.rules["/object"] = says(200, blob)
        between.rules[f"blobs/{digest_of(blob)}"] = says(307, Location=f"http://{elsewhere.address}/object")
        known = {"auths": {between.address: {"auth": BASIC[6:]}, elsewhere.address: {"auth": BASIC[6:]}}}
        (home / ".docker" / "config.json").write_text(json.dumps(known))
        shelf = Shelf()
        shelf.fetch(reference(between, "secret:1"))
        assert list(shelf.kept.values()) == [blob]
        assert elsewhere.asked == [("/object", None)]
        assert between.asked[-1][1] == BASIC


# --- connections break ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False], ids=["a server with ranges", "one without"])
def test_a_broken_blob_goes_on_where_it_stopped_or_is_read_again(
    registry: Registry, between: Front, ranges: bool
) -> None:
    content = layer({"a": noise("broken", 900_000)}, "")
    registry.push("broken", "1", [content])
    asked: list[str | None] = []

    def breaks(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.headers.get("Range"))
        if not ranges:
            del handler.headers["Range"]
        between.passed_on(handler, 300_000 if ranges else None if len(asked) == 3 else 700_000)

    between.rules[content.digest] = breaks
    shelf = Shelf()
    shelf.fetch(reference(between, "broken:1"))
    assert shelf.kept == {content.digest: content.blob}
    assert len(asked) == (4 if ranges else 3)
    assert not ranges or asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_busy_registry_is_asked_again_and_a_dead_one_given_up(registry: Registry, between: Front) -> None:
    content = layer({"a": b"busy"})
    registry.push("busy", "1", [content])
    answers = iter([says(503), says(429, b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}')])

    def busy(handler: BaseHTTPRequestHandler) -> None:
        next(answers, between.passed_on)(handler)

    between.rules["manifests/1"] = busy
    assert len(Shelf().fetch(reference(between, "busy:1")).layers) == 1
    between.rules["manifests/1"] = says(502)
    with pytest.raises(SiteError, match=r"busy:1: the registry answers 502; gave up after 5 tries"):
        Shelf().fetch(reference(between, "busy:1"))
    del between.rules["manifests/1"]
    between.rules[content.digest] = lambda handler: between.passed_on(handler, 10)
    shelf = Shelf()
    with pytest.raises(SiteError, match=r"ended early; \d+ of \d+ bytes received, gave up after 5 tries"):
        shelf.fetch(reference(between, "busy:1"))
    assert shelf.kept == {}


def test_a_registry_that_is_silent_or_slow_is_given_up(
    registry: Registry, between: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = layer({"a": noise("slow")})
    registry.push("slow", "1", [content])
    released = threading.Event()
    for path, message in (
        ("manifests/1", r"timed out.*; gave up after 5 tries"),
        (content.digest, r"0 of \d+ bytes received, gave up after 5 tries"),
    ):
        between.rules = {path: lambda _: released.wait(60)}
        with monkeypatch.context() as patched:
            patched.setattr(client, "TIMEOUT_S", 0.3)
            with pytest.raises(SiteError, match=message):
                Shelf().fetch(reference(between, "slow:1"))
    released.set()
    between.rules = {}
    monkeypatch.setattr(client, "GRACE_S", -1.0)
    monkeypatch.setattr(client, "MIN_BYTES_PER_S", 10**9)
    with pytest.raises(SiteError, match=r"\d+ of \d+ bytes received; the download is too slow|did not arrive within"):
        Shelf().fetch(reference(between, "slow:1"))


def test_ctrl_c_does_not_wait_for_a_registry_that_is_silent(registry: Registry, between: Front) -> None:
    contents = [layer({name: noise(name)}) for name in ("first", "second")]
    registry.push("silent", "1", contents)
    released = threading.Event()
    for content in contents:
        between.rules[content.digest] = lambda _: released.wait(60)
    program = (
        "from megaflow_hpc.environments.images.registry.image import fetch\n"
        "from megaflow_hpc.environments.images.registry.client import Reference\n"
        f"fetch(Reference('{between.address}', 'silent', '1', True), lambda _: False, lambda _, chunks: list(chunks))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    try:
        until(lambda: len(between.blobs()) == 3, "both layers are asked for", every_s=0.01)
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=30)[1]
    finally:
        released.set()
        process.kill()
        process.wait()


# --- hostile registries -----------------------------------------------------------------------------------------------


def manifest_of(contents: list[Layer], **changes: Any) -> bytes:
    config = config_of(contents)
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {"mediaType": f"{LAYER}+gzip", "digest": f"sha256:{each.digest}", "size": len(each.blob)}
            for each in contents
        ],
    }
    return json.dumps(manifest | changes).encode()


def config_of(layers: list[Layer]) -> bytes:
    archives = [digest_of(each.archive) for each in layers]
    return json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": archives}}).encode()


ONE = layer({"a": noise("one")})


def changed_layer(**changes: object) -> bytes:
    known = {"mediaType": f"{LAYER}+gzip", "digest": f"sha256:{ONE.digest}", "size": 5}
    return manifest_of([], layers=[known | changes])


def sent(manifest: bytes, **headers: str) -> dict[str, Answer]:
    """Returns the rule that answers with a manifest."""
    return {"/1": says(200, manifest, **headers)}


TOKEN = "/token?scope=repository%3Aone%3Apull"
UNREADABLE = r"its manifest cannot be read"
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
LARGE = {"digest": f"sha256:{ONE.digest}", "size": 1 << 40}
HOSTILE: dict[str, tuple[dict[str, Answer], str]] = {
    "a longer blob": ({ONE.digest: says(200, ONE.blob + b"x")}, r"\d+ bytes; its manifest says \d+"),
    "an endless blob": ({ONE.digest: endless}, r"longer than the \d+ bytes that its manifest says"),
    "an endless manifest": ({"/1": endless}, r"manifest 1 has more than 4194304 bytes"),
    "no JSON": (sent(b"\xff\xfe", Content_Type=MANIFEST), UNREADABLE),
    "deep JSON": (sent(b'{"layers":' + b"[" * 10**6, Content_Type=MANIFEST), UNREADABLE),
    "a path for a digest": (sent(changed_layer(digest="sha256:../../etc")), UNREADABLE),
    "a digest and more": (sent(changed_layer(digest=f"sha256:{ONE.digest}/../x")), rf"{UNREADABLE}: .*digest"),
    "a digest and a line": (sent(changed_layer(digest=f"sha256:{ONE.digest}\n")), UNREADABLE),
    "a negative size": (sent(changed_layer(size=-1)), UNREADABLE),
    "no layer": (sent(changed_layer(mediaType=FOREIGN)), rf"'{FOREIGN}' is not a layer"),
    "many layers": (sent(manifest_of([ONE] * 1001)), r"1001 layers; at most 1000 are supported"),
    "no image": (
        sent(manifest_of([ONE], mediaType="application/vnd.cncf.helm.config.v1+json")),
        r"is not a manifest of a container image",
    ),
    "another configuration": ({digest_of(config_of([ONE])): says(200, b"{}")}, r"ended early|registry sent sha256"),
    "a large configuration": (
        sent(manifest_of([ONE], config=LARGE)),
        r"its configuration has 1099511627776 bytes, at most 4194304 are supported",
    ),
    "archives that do not fit": (
        sent(manifest_of([ONE, ONE], config=json.loads(manifest_of([ONE]))["config"])),
        r"2 layers, but its configuration lists 1",
    ),
    "a circle": ({"/1": says(307, Location="1")}, r"more than 5 redirections"),
    "a file": ({"/1": says(307, Location="file:///etc/passwd")}, r"redirects 'file:///etc/passwd', which is not https"),
    "terminal codes": (
        {"/1": says(404, b'{"errors": [{"code": "\\u001b[2J", "message": "x"}]}')},
        r"404 \(\?\[2J: x\)$",
    ),
    "a token server by file": (
        {"/1": says(401, WWW_Authenticate='Bearer realm="file:///etc/passwd",service="x"')},
        r"takes its tokens from 'file:///etc/passwd', which is not https",
    ),
    "a token with a header": (
        {TOKEN: says(200, b'{"token": "x\\r\\nHost: y"}')},
        "issued no token without credentials",
    ),
    "an endless token": ({TOKEN: endless}, r"the answer of its token server has more than 1048576 bytes"),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_what_is_not_as_it_should_be_is_an_error_and_nothing_is_kept(lie: str) -> None:
    rules, message = HOSTILE[lie]
    with front() as server:
        honest = {
            "/1": says(200, manifest_of([ONE]), Content_Type=MANIFEST),
            digest_of(config_of([ONE])): says(200, config_of([ONE])),
            ONE.digest: says(200, ONE.blob),
        }
        if TOKEN in rules:
            honest["/1"] = says(401, WWW_Authenticate=f'Bearer realm="http://{server.address}/token"')
        server.rules = honest | rules
        shelf = Shelf()
        with pytest.raises(SiteError, match=message):
            shelf.fetch(reference(server, "one:1"))
        assert shelf.kept == {}


def test_a_manifest_by_digest_is_that_manifest(registry: Registry, between: Front) -> None:
    described = registry.push("exact", "1", [ONE])
    between.rules[described["digest"]] = says(200, manifest_of([]), Content_Type=MANIFEST)
    with pytest.raises(SiteError, match=rf"requested manifest {described['digest']}, but the registry sent sha256:"):
        Shelf().fetch(reference(between, f"exact@{described['digest']}"))


def test_one_layer_that_fails_ends_the_others(
    registry: Registry, between: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [layer({str(number): noise(str(number), 10_000)}) for number in range(4)]
    registry.push("ends", "1", contents)
    between.rules[contents[1].digest] = says(404)
    monkeypatch.setattr(f"{fetch.__module__}.PARALLEL_LAYERS", 1)
    with pytest.raises(SiteError, match=rf"not found in the registry: blobs/sha256:{contents[1].digest}: 404"):
        Shelf().fetch(reference(between, "ends:1"))
    assert between.blobs()[1:] == [contents[0].digest, contents[1].digest]
