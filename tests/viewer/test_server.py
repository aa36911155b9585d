"""The server without a browser: what it answers, and above all what it does not."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gesso.types import UserError
from gesso.viewer import server
from gesso.viewer.files import Thumbnails, find_runs
from tests.typed import sure
from tests.viewer import folders
from tests.viewer.site import Studio
from tests.waiting import LIMIT, Started, until

pytest.importorskip("fastapi", reason='the page needs FastAPI: pip install "gesso[viewer]"')
from starlette.testclient import TestClient

LOCAL = "http://127.0.0.1:7860"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    run = folders.make(root / "one", 4)
    folders.evaluate(run, 0, ["a sign", "another"])
    folders.evaluate(run, 4, ["a sign", "another"], shade=200)
    folders.batch(run, 4, [0.5, -0.5])
    folders.make(root / "deep" / "er" / "two", 2)
    (tmp_path / "secret.png").write_bytes(b"secret")
    return root


@pytest.fixture
def studio() -> Studio:
    return Studio()


@pytest.fixture
def client(runs: Path, studio: Studio) -> Iterator[TestClient]:
    with TestClient(server.app(runs, studio, None), base_url=LOCAL) as made:
        yield made


def test_runs_are_found_at_any_of_three_depths(runs: Path) -> None:
    assert list(find_runs(runs)) == ["deep/er/two", "one"]
    assert list(find_runs(runs / "one")) == ["one"]
    assert find_runs(runs.parent / "runs" / "one" / "samples") == {}
    with pytest.raises(UserError, match=r"folder .*gone does not exist; expected a folder of runs"):
        find_runs(runs / "gone")


def test_a_run_under_a_link_is_not_found(runs: Path, tmp_path: Path) -> None:
    folders.make(tmp_path / "elsewhere" / "three", 1)
    (runs / "link").symlink_to(tmp_path / "elsewhere")
    assert list(find_runs(runs)) == ["deep/er/two", "one"]


def test_the_page_and_its_parts(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "<script" in page.text
    for name in server.ASSETS:
        assert client.get(name).status_code == 200, name
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"


def test_answers(client: TestClient) -> None:
    table = client.get("/api/runs").json()
    assert {row["id"] for row in table} == {"one", "deep/er/two"}
    one = client.get("/api/run", params={"run": "one"}).json()
    assert one["step"] == 4 and one["group_steps"] == [4] and "reward" in one["keys"]
    assert 'name = "flow-grpo"' in one["config"]
    query = {"run": "deep/er/two", "keys": "reward,eval/reward"}
    found = client.get("/api/curves", params=query).json()
    assert found["series"]["reward"]["y"] == [0.1, 0.2]
    evolution = client.get("/api/evolution", params={"run": "one"}).json()
    assert evolution["steps"] == [0, 4] and len(evolution["prompts"]) == 2
    groups = client.get("/api/groups", params={"run": "one", "step": "4"}).json()
    assert groups[0]["samples"][0]["share"] == 0.5


def test_a_run_that_begins_later_is_found(client: TestClient, runs: Path) -> None:
    assert client.get("/api/run", params={"run": "new"}).status_code == 404
    folders.make(runs / "new", 1)
    assert client.get("/api/run", params={"run": "new"}).json()["step"] == 1


def picture(client: TestClient, name: str, **query: Any) -> Any:
    return client.get("/image", params={"run": "one", "name": name, **query})


def test_images_whole_and_small(client: TestClient, runs: Path) -> None:
    whole = picture(client, "samples/000004/000.png")
    assert whole.content == (runs / "one/samples/000004/000.png").read_bytes()
    assert whole.headers["content-type"] == "image/png"
    Image.new("RGB", (400, 200), "red").save(runs / "one/samples/000004/000.png")
    small = picture(client, "samples/000004/000.png", width=96)
    assert small.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(small.content)).size == (96, 48)
    assert picture(client, "samples/000004/000.png", width=97).status_code == 404
    assert picture(client, "groups/000004/000-01.webp").headers["content-type"] == "image/webp"


def test_a_small_version_follows_its_image(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    made = Thumbnails(limit=1)  # remembers the latest only
    for colour in ("red", "blue"):
        Image.new("RGB", (200, 100), colour).save(file)
        os.utime(file, ns=(0, hash(colour) % 10**9))
        seen = Image.open(io.BytesIO(made.get(file, 96))).convert("RGB").getpixel((5, 5))
        assert (sure(tuple, seen)[0] > 200) == (colour == "red")
    assert len(made._made) == 1


NAMES = [
    "config.toml",
    "../../secret.png",
    "samples/../../../secret.png",
    "/etc/passwd",
    "samples/000004/../../../../secret.png",
    "samples/000004/000.png/../../../../../secret.png",
    "samples/000004/..%2f..%2f..%2f..%2fsecret.png",
    "samples\\000004\\000.png",
    "samples/000004/000.png\x00",
    "samples/000004/000.png\n",
    "checkpoints/000004/learner.safetensors",
    "samples/000004.jsonl",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_images_of_runs_can_be_read(client: TestClient, name: str) -> None:
    answer = picture(client, name)
    assert answer.status_code == 404 and "error" in answer.json()


@pytest.mark.parametrize("run", ["..", "../runs/one", "/", "one/../one", "", ".", "one/samples"])
def test_only_runs_that_were_found_can_be_named(client: TestClient, run: str) -> None:
    query = {"run": run, "name": "samples/000004/000.png"}
    assert client.get("/image", params=query).status_code == 404
    assert client.get("/api/evolution", params={"run": run}).status_code == 404


def test_links_out_of_a_run_are_not_followed(
    client: TestClient, runs: Path, tmp_path: Path
) -> None:
    file = runs / "one/samples/000004/000.png"
    file.unlink()
    file.symlink_to(tmp_path / "secret.png")
    assert picture(client, "samples/000004/000.png").status_code == 404
    outside = tmp_path / "000008"
    outside.mkdir()
    (outside / "000.png").write_bytes(b"secret")
    (runs / "one/samples/000008").symlink_to(outside)
    assert picture(client, "samples/000008/000.png").status_code == 404


def test_encoded_paths_reach_nothing(client: TestClient) -> None:
    for path in ("/../secret.png", "/%2e%2e/secret.png", "//etc/passwd", "/page/core.js", "/x"):
        assert client.get(path).status_code == 404, path


def test_a_corrupt_image_is_a_sentence(client: TestClient, runs: Path) -> None:
    (runs / "one/samples/000004/000.png").write_bytes(b"no picture")
    answer = picture(client, "samples/000004/000.png", width=96)
    assert answer.status_code == 404 and "cannot be read" in answer.json()["error"]


def test_wrong_questions_are_sentences(client: TestClient) -> None:
    answer = client.get("/api/groups", params={"run": "one", "step": "x"})
    assert answer.status_code == 404 and "expected an integer" in answer.json()["error"]
    answer = client.get("/film", params={"run": "one", "kind": "avi"})
    assert answer.json()["error"] == 'kind = "avi" is not supported; use gif, mp4 or sheet'
    answer = client.get("/film", params={"run": "one", "prompt": "9"})
    assert answer.json()["error"] == "one has no samples of prompt 9"
    answer = client.get("/film", params={"run": "deep/er/two", "kind": "sheet"})
    assert answer.json()["error"] == "two has no images for a contact sheet"


def test_without_a_token_only_this_machine_by_its_own_name(runs: Path, studio: Studio) -> None:
    made = server.app(runs, studio, None)
    for host, code in (
        ("http://localhost:1", 200),
        ("http://127.0.0.1", 200),
        ("http://[::1]:80", 200),
        ("http://evil.example", 403),  # a name that was made to point here
        ("http://192.168.0.9:7860", 403),
    ):
        with TestClient(made, base_url=host) as client:
            assert client.get("/api/runs").status_code == code, host


def test_requests_without_the_token_are_refused(runs: Path, studio: Studio) -> None:
    with TestClient(server.app(runs, studio, "s3cret"), base_url="http://10.0.0.1") as client:
        for path in ("/", "/core.js", "/api/runs", "/?token=wrong", "/api/runs?token=s3cret"):
            assert client.get(path).status_code == 403, path
        answer = client.get("/?token=s3cret")  # becomes a cookie, and leaves the address bar
        assert answer.status_code == 200 and answer.url.query == b""
        assert client.get("/api/runs").status_code == 200
        client.cookies.clear()
        assert client.get("/api/runs").status_code == 403
        bearer = {"Authorization": "Bearer s3cret"}
        assert client.get("/api/runs", headers=bearer).status_code == 200


def test_another_host_needs_a_token(runs: Path, studio: Studio) -> None:
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0 accepts connections"):
        server.serve(runs, studio, "0.0.0.0", 0, None)


def wait(client: TestClient, state: str) -> dict[str, Any]:
    until(lambda: client.get("/api/play").json()["state"] != "busy")
    seen = client.get("/api/play").json()
    assert seen["state"] == state, seen
    return seen


ASK = {"run": "one", "prompt": "a sign", "seed": 5}


def test_the_playground_reports_how_far_it_is_and_what_came_of_it(
    client: TestClient, studio: Studio
) -> None:
    studio.go.clear()
    assert client.post("/api/play", json=ASK).json()["state"] == "busy"
    until(lambda: client.get("/api/play").json()["share"] == 0.25)
    seen = client.get("/api/play").json()
    assert (seen["state"], seen["share"], seen["result"]) == ("busy", 0.25, {})
    answer = client.post("/api/play", json=ASK)
    assert answer.status_code == 422 and "is busy" in answer.json()["error"]
    studio.go.set()
    assert wait(client, "done")["result"]["trained"][0]["reward"] == 0.75
    assert studio.asked[0].seed == 5


def test_a_playground_that_fails_says_why_and_goes_on(client: TestClient, studio: Studio) -> None:
    for error, told in (
        (UserError("no checkpoint yet"), "no checkpoint yet"),
        (RuntimeError("boom"), "RuntimeError: boom"),
    ):
        studio.error = error
        client.post("/api/play", json=ASK)
        assert wait(client, "failed")["result"] == {"error": told}
    studio.error = None
    client.post("/api/play", json=ASK)
    wait(client, "done")


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"run": "one"}, '"prompt" is missing'),
        ({**ASK, "n": 99}, '"n" = 99 is not valid'),
        ({**ASK, "guidance": 2}, 'unknown key "guidance"'),
    ],
)
def test_the_playground_answers_wrong_questions(
    client: TestClient, sent: dict[str, Any], told: str
) -> None:
    answer = client.post("/api/play", json=sent)
    assert answer.status_code == 422 and told in answer.json()["error"]
    assert client.post("/api/play", json={**ASK, "run": "../one"}).status_code == 404
    assert client.post("/api/play", content=b"{").status_code == 422


def test_another_page_cannot_make_it_draw(client: TestClient, studio: Studio) -> None:
    origin = {"Origin": "http://evil.example"}
    assert client.post("/api/play", json=ASK, headers=origin).status_code == 403
    assert client.post("/api/play", json=ASK, headers={"Origin": LOCAL}).status_code == 200
    wait(client, "done")
    assert len(studio.asked) == 1


def test_an_empty_folder(tmp_path: Path, studio: Studio) -> None:
    with TestClient(server.app(tmp_path, studio, None), base_url=LOCAL) as client:
        assert client.get("/api/runs").json() == []


def test_the_command_serves_and_ends(runs: Path) -> None:
    command = [sys.executable, "-m", "gesso.cli", "view", str(runs), "--port", "0"]
    import httpx

    started = Started(command)
    try:
        address = started.printed(r" at (http\S+)")[1]
        assert len(httpx.get(f"{address}/api/runs").json()) == 2
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(LIMIT) == 0, started.output()
    finally:
        started.end()


def test_texts_behind_links_are_not_read(client: TestClient, runs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text('{"step": 1, "reward": 0.123}\n')
    one = runs / "one"
    for name in ("log.txt", "metrics.jsonl", "samples/000004.jsonl", "groups/000004.jsonl"):
        (one / name).unlink(missing_ok=True)
        (one / name).symlink_to(secret)
    for path in ("/api/run", "/api/evolution", "/api/groups", "/api/curves"):
        answer = client.get(path, params={"run": "one", "step": "4", "keys": "reward"})
        assert answer.status_code == 200 and "0.123" not in answer.text, path
    (one / "config.toml").unlink()
    (one / "config.toml").symlink_to(secret)
    assert "0.123" not in client.get("/api/run", params={"run": "one"}).text


def test_an_image_that_was_sampled_anew_is_sent_anew(client: TestClient, runs: Path) -> None:
    query = {"run": "one", "name": "samples/000004/000.png", "width": "96"}
    first = client.get("/image", params=query)
    assert first.headers["cache-control"] == "no-cache"
    same = {"If-None-Match": first.headers["etag"]}
    assert client.get("/image", params=query, headers=same).status_code == 304
    Image.new("RGB", (24, 8), "red").save(runs / "one/samples/000004/000.png")
    again = client.get("/image", params=query, headers=same)
    assert again.status_code == 200 and again.content != first.content


ODD = [
    '"health": null',
    '"health": 5',
    '"health": [["a"], {}]',
    f'"reward": {"9" * 400}',
    '"reward": NaN',
    '"reward": {"a": 1}',
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_one_odd_run_does_not_take_the_others_down(
    client: TestClient, runs: Path, odd: str
) -> None:
    with (runs / "one" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 5, "time/step": 1.0, {odd}}}\n')
    table = client.get("/api/runs").json()
    assert {row["id"] for row in table} == {"one", "deep/er/two"}
    query = {"run": "one", "keys": "reward,time/step"}
    assert client.get("/api/curves", params=query).json()["step"] == 5
    assert client.get("/report", params={"run": "one"}).status_code == 200


def test_odd_files_are_passed_over(client: TestClient, runs: Path) -> None:
    one = runs / "one"
    (one / "samples" / "²²².jsonl").write_text("{}\n")
    (one / "samples" / "000006.jsonl").symlink_to("nowhere")
    (one / "groups" / "000004.jsonl").write_text('{"samples": [1]}\n{"samples": [], "shown": 5}\n')
    assert client.get("/api/evolution", params={"run": "one"}).json()["steps"] == [0, 4]
    assert client.get("/api/groups", params={"run": "one", "step": "4"}).json() == []
    (one / "metrics.jsonl").unlink()
    (one / "metrics.jsonl").mkdir()
    assert len(client.get("/api/runs").json()) == 2


def test_a_part_that_is_no_number_is_null(client: TestClient, runs: Path) -> None:
    file = runs / "one/samples/000004.jsonl"
    file.write_text(file.read_text().replace('"ocr": 0.4', '"ocr": NaN'))
    prompts = client.get("/api/evolution", params={"run": "one"}).json()["prompts"]
    assert prompts[0]["cells"][1]["parts"] == {"ocr": None}


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "1.5", "٣"])
def test_invalid_numbers(client: TestClient, number: str) -> None:
    for path, key in (("/api/groups", "step"), ("/film", "prompt")):
        answer = client.get(path, params={"run": "one", key: number})
        assert answer.status_code == 404 and len(answer.text) < 200


def test_odd_requests_are_refused(client: TestClient, runs: Path, studio: Studio) -> None:
    for body in (b"null", b"[" * 100_000, b"5"):
        answer = client.post("/api/play", content=body)
        assert answer.status_code == 422 and "playground: expected" in answer.json()["error"]
    answer = client.post("/api/play", content=b"{}")
    assert answer.json()["error"].startswith('playground: "run" is missing')
    assert client.get("/api/runs", headers={"Host": "[::1"}).status_code == 403
    large = {"Content-Length": str(server.BODY + 1)}
    answer = client.post("/api/play", content=b"{}", headers=large)
    assert "a request must have at most" in answer.json()["error"]
    with TestClient(server.app(runs, studio, "s3cret"), base_url="http://10.0.0.1") as other:
        assert other.get("/?token=é").status_code == 403


def test_the_cookie_is_for_this_page_alone(runs: Path, studio: Studio) -> None:
    with TestClient(server.app(runs, studio, "s3cret"), base_url="http://10.0.0.1") as client:
        answer = client.get("/?token=s3cret", follow_redirects=False)
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie


def test_the_policy_lets_nothing_else_in(client: TestClient) -> None:
    parts = dict(
        part.strip().split(" ", 1)
        for part in client.get("/").headers["content-security-policy"].split(";")
    )
    assert parts["default-src"] == "'none'" and parts["script-src"] == "'self'"
    assert parts["img-src"] == "'self' data: blob:" and parts["connect-src"] == "'self'"
    assert parts["frame-ancestors"] == parts["base-uri"] == "'none'"


def test_the_newest_run_comes_first(client: TestClient, runs: Path) -> None:
    for now, name in ((1, "one"), (2, "deep/er/two")):
        for file in ("config.toml", "metrics.jsonl"):
            os.utime(runs / name / file, (now, now))
    assert [row["id"] for row in client.get("/api/runs").json()] == ["deep/er/two", "one"]


def test_a_refusal_has_the_same_headers(runs: Path, studio: Studio) -> None:
    with TestClient(server.app(runs, studio, "s3cret"), base_url="http://10.0.0.1") as client:
        refused = client.get("/")
    assert refused.status_code == 403
    assert {name.lower() for name in server.HEADERS} <= set(refused.headers)


def test_the_name_of_a_file_cannot_leave_its_header() -> None:
    head = server._file(b"", "text/html", 'a"\r\nSet-Cookie: x; ü.html').headers
    assert head["content-disposition"] == 'attachment; filename="a___Set-Cookie__x___.html"'


def test_a_report_has_the_runs_requested(client: TestClient) -> None:
    page = client.get("/report", params={"run": "deep/er/two"})
    assert '"id":"deep/er/two"' in page.text and '"id":"one"' not in page.text


def test_long_curves_are_sent_short(client: TestClient, runs: Path) -> None:
    with (runs / "one" / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "reward": 0.5}}\n' for step in range(5, 1500))
    query = {"run": "one", "keys": "reward"}
    line = client.get("/api/curves", params=query).json()["series"]["reward"]
    assert len(line["y"]) == 1000 and line["step"][-1] == 1499 and line["count"] == 1499
