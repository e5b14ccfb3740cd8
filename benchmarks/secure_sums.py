"""What secure sums cost a site and the server: seconds of CPU, and bytes beside the numbers.

    python benchmarks/secure_sums.py --sites 10 --numbers 1663370

`lost` sites are lost between sharing and masking, which costs the server most.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedlens.algorithm.secure import enough
from fedlens.fleet.secure.protocol import Member, Round, is_signed, signed_by, trimmed, unmasked

STAGES = "begin", "share", "mask", "agree", "open"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--numbers", type=int, default=1_663_370, help="of an update: mcmahan-cnn")
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--lost", type=int, default=0)
    given = parser.parse_args()
    seconds = dict.fromkeys((*STAGES, "server"), 0.0)
    begun = time.process_time()

    def spent(stage: str) -> None:
        nonlocal begun
        now = time.process_time()
        seconds[stage] += (now - begun) / (1 if stage == "server" else given.sites)
        begun = now

    sites = range(given.sites)
    round = Round("benchmark", tuple(sites), enough(2 / 3, given.sites), given.bits)
    own = [ec.generate_private_key(ec.SECP384R1()) for _ in sites]
    public = [key.public_key() for key in own]
    numbers = np.random.default_rng(0).integers(-1000, 1000, given.numbers)
    spent("server")
    seconds["server"] = 0.0

    def verify(site: int, message: bytes, signature: bytes) -> bool:
        return is_signed(public[site], message, signature)

    members, keys = {}, {}
    for site in sites:
        members[site], keys[site] = Member.begin(round, site, signed_by(own[site]))
    spent("begin")
    sealed, signatures, opened = {}, {}, {}
    for site in sites:
        members[site], sealed[site] = members[site].share(keys, verify)
    spent("share")
    total, there = np.zeros(given.numbers, round.word), sites[given.lost :]
    for site in there:
        passed = {one: sealed[one][site] for one in sites if one != site}
        members[site], masked = members[site].mask(numbers, passed)
        spent("mask")
        total = trimmed(total + masked, round)
        spent("server")
    for site in there:
        members[site], signatures[site] = members[site].agree(there, signed_by(own[site]))
    spent("agree")
    for site in there:
        members[site], opened[site] = members[site].open(signatures, verify)
    spent("open")
    found = unmasked(total, round, keys, sealed, there, opened)
    spent("server")
    assert np.array_equal(found, len(there) * numbers)
    plain = given.numbers * given.bits / 8
    sizes = [sum(map(len, one)) for one in keys.values()]
    up = sum(sizes) / given.sites + sum(map(len, sealed[0].values())) + len(signatures[there[0]])
    up += sum(len(share) for each in opened[there[0]] for share in each.values())
    print(json.dumps(vars(given) | {"seconds": seconds, "bytes_up": plain + up, "plain": plain}))


if __name__ == "__main__":
    main()
