"""The web page over run folders: `gesso view`. It reads what runs have written and changes nothing.

reading.py    a run folder → plain figures, as far as it is written, damaged parts named
files.py      which files of a run may be shown, and small versions of its pictures
film.py       an evolution as GIF, MP4 or contact sheet
server.py     the same over HTTP
playground.py  requests to draw, one job at a time; studio.py draws
status.py     how a run is, from its log
report.py     the page with everything inside: one file to send to somebody
page/         what the browser gets
"""
