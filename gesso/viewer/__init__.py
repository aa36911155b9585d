"""The web page for run folders: `gesso view`. It only reads run folders.

reading.py    a run folder as plain data; incomplete and damaged parts are skipped and reported
files.py      access to the images of a run, and thumbnails
film.py       an evolution as GIF, MP4 or contact sheet
server.py     the HTTP server
playground.py  generation requests, one job at a time; studio.py runs them
status.py     the health of a run, from its log
report.py     the page as a single self-contained HTML file
page/         files for the browser
"""
