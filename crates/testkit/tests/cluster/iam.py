# What an identity provider and an AWS SDK do with a pod's token. Runs on the machine, beside a service
# that stands for AWS; all it has of the pod are the variables and the token.
import base64, json, os, ssl, urllib.error, urllib.request

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

context = ssl.create_default_context(cafile=os.environ["CLUSTER_CA"])


def get(path):
    return json.load(urllib.request.urlopen(os.environ["API_SERVER"] + path, context=context))


def decode(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def number(data):
    return int.from_bytes(data, "big")


# No credentials are shown: the provider has none.
issuer = get("/.well-known/openid-configuration")
keys = {key["kid"]: key for key in get("/openid/v1/jwks")["keys"]}
assert issuer["jwks_uri"] == issuer["issuer"] + "/openid/v1/jwks", issuer
for path in ["/api", "/openid/v1", "/version"]:
    try:
        get(path)
        raise SystemExit(path + " is open to everybody")
    except urllib.error.HTTPError as error:
        assert error.code == 401, (path, error)

token = open(os.environ["AWS_WEB_IDENTITY_TOKEN_FILE"]).read()
header, payload, signature = token.split(".")
key = keys[json.loads(decode(header))["kid"]]
raw = decode(signature)
half = len(raw) // 2
public = ec.EllipticCurvePublicNumbers(number(decode(key["x"])), number(decode(key["y"])), ec.SECP256R1())
public.public_key().verify(
    encode_dss_signature(number(raw[:half]), number(raw[half:])),
    f"{header}.{payload}".encode(),
    ec.ECDSA(hashes.SHA256()),
)
claims = json.loads(decode(payload))
assert claims["iss"] == issuer["issuer"], claims
print(",".join(claims["aud"]), claims["sub"], claims["exp"] - claims["iat"])

from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
host, port = server.get_host_and_port()
os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
import boto3

print(boto3.client("sts").get_caller_identity()["Arn"])
server.stop()
