"""The middle tier: counts its visits in Redis and says who answered."""
import http.server, os, signal, sys, threading
import redis

store = redis.Redis(host="redis-0.redis", socket_timeout=5)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/healthz":
            body = "ok" if store.ping() else "no"
        else:
            body = "%s %s %d" % (os.environ["VERSION"], os.environ["HOSTNAME"], store.incr("visits"))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("", 8000), Handler)
server.daemon_threads = False
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
