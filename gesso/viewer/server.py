"""The page over HTTP. Loopback needs no token; other clients must send one, which becomes a cookie.

GET  /api/runs                       the table of runs
GET  /api/run?run=ID                 one run: its keys, notes, config, damage
GET  /api/curves?run=ID&keys=a,b     series, thinned out
GET  /api/evolution?run=ID           prompts × evaluations
GET  /api/groups?run=ID&step=10      the groups of a training step
GET  /api/timeline?run=ID             who did what when; with &step=10, of that step
GET  /image?run=ID&name=…&width=…    an image, or a thumbnail if a width is given
GET  /film?run=ID&prompt=0&kind=gif  an evolution for download: gif, mp4; kind=sheet: all prompts
GET  /report?run=ID&run=ID           the page with these runs embedded, as one file
POST /api/play                       generate in the playground; GET /api/play returns its progress
"""

from __future__ import annotations

import hmac
import json
import mimetypes
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gesso import serving
from gesso.config.parsing import parse
from gesso.types import UserError
from gesso.viewer import film, report, timelines
from gesso.viewer.files import NotShown, Thumbnails, find_runs, image_file, video_file
from gesso.viewer.playground import Playground, PlaygroundBackend, PlaygroundRequest
from gesso.viewer.reading import RunReader

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

PAGE = Path(__file__).parent / "page"
ASSETS = {f"/{name}": PAGE / name for name in report.PARTS}
POINTS = 1_000  # maximum number of points per curve
COOKIE = "gesso-token"
BODY = 32 * 2**20  # maximum bytes of a playground request, including its image
MAX_UPLOAD = (BODY - 2**18) * 3 // 4  # bytes of its images; base64 and the texts take the rest
NUMBER = re.compile(r"[0-9]{1,12}")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Library:
    """The runs under one folder; each lookup includes new runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._readers: dict[str, RunReader] = {}
        self.thumbnails = Thumbnails()

    def readers(self) -> dict[str, RunReader]:
        folders = find_runs(self.root)
        self._readers = {
            name: self._readers.get(name) or RunReader(path) for name, path in folders.items()
        }
        return self._readers

    def run(self, name: str) -> RunReader:
        reader = self._readers.get(name) or self.readers().get(name)
        if reader is None:
            raise NotShown(f"run {name!r} does not exist under {self.root.name}")
        return reader

    def table(self) -> list[dict[str, Any]]:
        """Rows of all runs, newest first."""
        rows = [{"id": name, **reader.summary()} for name, reader in self.readers().items()]
        return sorted(rows, key=lambda row: -row["changed"])


def app(root: Path, backend: PlaygroundBackend, token: str | None) -> FastAPI:
    try:
        from fastapi import FastAPI
        from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
        from starlette.concurrency import run_in_threadpool
    except ImportError as error:
        raise UserError('`gesso view` requires FastAPI: pip install "gesso[viewer]"') from error

    server = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    library = Library(root)
    library.readers()  # raises for a wrong folder
    server.state.library = library
    playground = Playground(backend)

    @server.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        given = request.query_params.get("token", "")
        if token and request.url.path == "/" and _same(given, token):
            response: Response = RedirectResponse("/", 303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        else:
            reason = _rejection(request, token)
            response = Response(reason, 403) if reason else await call_next(request)
        response.headers.update({k: v for k, v in HEADERS.items() if k not in response.headers})
        return response

    @server.exception_handler(NotShown)
    async def missing(request: Request, error: NotShown) -> Response:
        return JSONResponse({"error": str(error)}, 404)

    @server.exception_handler(UserError)
    async def wrong(request: Request, error: UserError) -> Response:
        return JSONResponse({"error": str(error)}, 422)

    def get(path: str, answer: Callable[[Any], Any]) -> None:
        """A route whose plain result is sent as JSON, computed outside of the event loop. A browser
        with the same version in its cache gets 304."""

        async def route(request: Request) -> Response:
            result = await run_in_threadpool(answer, request.query_params)
            response = result if isinstance(result, Response) else _json(result)
            tag = response.headers.get("etag", "")
            cached = tag and tag == request.headers.get("if-none-match")
            return Response(status_code=304, headers={"etag": tag}) if cached else response

        server.add_route(path, route, methods=["GET"])

    def asset(path: str) -> Callable[[Any], Response]:
        kind = mimetypes.guess_type(path)[0]
        return lambda query: Response(ASSETS[path].read_bytes(), media_type=kind)

    def details(query: Any) -> dict[str, Any]:
        name = query.get("run", "")
        return {"id": name, **library.run(name).details()}

    def curves(query: Any) -> dict[str, Any]:
        keys = [key for key in query.get("keys", "").split(",") if key]
        return library.run(query.get("run", "")).curves(keys, POINTS)

    def image(query: Any) -> Response:
        path = image_file(library.run(query.get("run", "")).path, query.get("name", ""))
        width, now = query.get("width", ""), path.stat()
        tag = {"ETag": f'"{now.st_mtime_ns:x}-{now.st_size:x}-{width}"'}  # a run may be repeated
        if width:
            data = library.thumbnails.get(path, _whole(width, "width"))
            return Response(data, media_type="image/webp", headers=tag)
        kind = "image/webp" if path.suffix == ".webp" else "image/png"
        return Response(path.read_bytes(), media_type=kind, headers=tag)

    def video(query: Any) -> Response:
        path = video_file(library.run(query.get("run", "")).path, query.get("name", ""))
        return FileResponse(path, media_type="video/mp4")  # answers requests of ranges: seeking

    def film_of(query: Any) -> Response:
        reader, kind = library.run(query.get("run", "")), query.get("kind", "gif")
        if kind == "sheet":
            return _file(film.sheet(reader), "image/png", f"{reader.path.name}-sheet.png")
        makers = {"gif": (film.gif, "image/gif"), "mp4": (film.mp4, "video/mp4")}
        if kind not in makers:
            raise NotShown(f'kind = "{kind}" is not supported; use gif, mp4 or sheet')
        make, media = makers[kind]
        prompt = _whole(query.get("prompt", "0"), "prompt")
        data = make(film.frames(reader, prompt))
        return _file(data, media, f"{reader.path.name}-{prompt:03d}.{kind}")

    def whole(query: Any) -> Response:
        names = query.getlist("run") or list(library.readers())[:1]
        page = report.page({name: library.run(name) for name in names}, library.thumbnails)
        return _file(page.encode(), "text/html", f"{Path(names[0]).name}.html")

    def groups(query: Any) -> list[dict[str, Any]]:
        step = _whole(query.get("step", ""), "step")
        return library.run(query.get("run", "")).groups(step)

    def timeline(query: Any) -> dict[str, Any]:
        steps = timelines.steps_of(library.run(query.get("run", "")))
        if "step" not in query:
            return timelines.summary(steps)
        return timelines.step(steps, _whole(query["step"], "step"))

    async def play(request: Request) -> Response:
        if int(request.headers.get("content-length", BODY + 1)) > BODY:
            raise UserError(f"playground: a request must have at most {BODY:,} bytes")
        try:
            given = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise UserError(f"playground: expected JSON ({error})") from None
        if not isinstance(given, dict):
            raise UserError("playground: expected a JSON object")
        play_request = parse(PlaygroundRequest, given, "playground")
        run = library.run(play_request.run).path
        return _json(playground.start(run, play_request))

    for path in ASSETS:
        get(path, asset(path))
    get("/", lambda query: Response(report.index(MAX_UPLOAD), media_type="text/html"))
    get("/api/runs", lambda query: library.table())
    get("/api/run", details)
    get("/api/curves", curves)
    get("/api/evolution", lambda query: library.run(query.get("run", "")).evolution())
    get("/api/groups", groups)
    get("/api/timeline", timeline)
    get("/api/play", lambda query: playground.job.snapshot())
    get("/image", image)
    get("/video", video)
    get("/film", film_of)
    get("/report", whole)
    server.add_route("/api/play", play, methods=["POST"])
    return server


def _rejection(request: Request, token: str | None) -> str:
    """Why this request is rejected, or ""."""
    if token:
        given = request.cookies.get(COOKIE) or request.headers.get("authorization", "")
        if not _same(given.removeprefix("Bearer "), token):
            return "a token is required; open the address that `gesso view` printed"
    elif not serving.is_loopback(_hostname(request.headers.get("host", ""))):
        return "only requests to a loopback address are allowed; use http://127.0.0.1 or localhost"
    origin = request.headers.get("origin")
    if origin and request.method != "GET" and urlsplit(origin).netloc != request.headers["host"]:
        return "cross-origin requests are not allowed"
    return ""


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # an unclosed bracket
        return ""


def _json(value: Any) -> Any:
    from fastapi.responses import Response

    return Response(report.as_json(value), media_type="application/json")


def _file(data: bytes, kind: str, name: str) -> Any:
    from fastapi.responses import Response

    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
    head = {"Content-Disposition": f'attachment; filename="{safe}"'}
    return Response(data, media_type=kind, headers=head)


def _whole(text: str, name: str) -> int:
    if not NUMBER.fullmatch(text):
        raise NotShown(f"{name}: expected an integer, got {text[:20]!r}")
    return int(text)


def serve(root: Path, backend: PlaygroundBackend, host: str, port: int, token: str | None) -> None:
    """Serves until SIGINT or SIGTERM."""
    serving.check_host(host, token)
    server = app(root, backend, token)

    def started(address: str) -> None:
        # load the data of the first page in advance
        threading.Thread(target=server.state.library.table, daemon=True).start()
        print(f"{root} at {address}{f'/?token={token}' if token else ''}", flush=True)

    async def ended() -> None:
        backend.close()

    serving.serve(server, host, port, started, ended)
