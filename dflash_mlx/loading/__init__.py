"""Names or paths -> a target and its drafter: files found, judged, read and put in place."""
