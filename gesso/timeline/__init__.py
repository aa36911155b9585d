"""What each process did when: recorded phases (`recorder.py`), the steps of a run
(`steps.py`), what to change (`advice.py`), and a trace for Chrome (`chrome.py`)."""
