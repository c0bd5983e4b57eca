"""A steady load of requests; prints one line for each that failed and a sum every second."""
import time, urllib.request

good, versions = 0, set()
last = time.monotonic()
while True:
    try:
        answer = urllib.request.urlopen("http://front/", timeout=10).read().decode()
        version, _, visits = answer.split()
        int(visits)
        versions.add(version)
        good += 1
    except Exception as error:
        print("failed:", error)
    if time.monotonic() - last > 1:
        last = time.monotonic()
        print("good:", good, "versions:", ",".join(sorted(versions)))
    time.sleep(0.1)
