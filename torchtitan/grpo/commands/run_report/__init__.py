"""The parts of report.py.

run_folder.py   a run's files -> `Run`: steps, answers, configuration
findings.py     what bounds the steps, what went well and what went wrong, in words
charts.py       numbers -> SVG
page.py         all of it -> one HTML file, by page.html
"""
