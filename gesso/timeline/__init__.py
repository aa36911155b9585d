"""Who did what when: phases that every process records (`recorder.py`), the steps of a run
(`steps.py`), what to change (`advice.py`), and a trace for Chrome (`chrome.py`)."""
