#!/usr/bin/env python3
"""A bad cable between the two namespaces of scripts/two_hosts_network.py make-wire: every frame
goes through this program, which delays, loses, holds up or breaks. Works without tc and netem.

    two_hosts_wire.py FOLDER     carries until it is killed; FOLDER/wire_up exists once it does

FOLDER/wire says how, and may change at any time (an empty file: a good cable), in words

    delay_ms=20   each way
    mbit=20       each way; beyond 256 frames that wait, frames are lost
    loss=5        per cent of the frames
    stall=1       nothing gets through any more, and nobody is told
    frames=40     the same after so many frames
    reset=1       TCP connections end with the next data, on both sides (RST)
"""

import collections
import contextlib
import ctypes
import heapq
import pathlib
import random
import select
import socket
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
ETH_P_ALL = 3
PACKET_OUTGOING = 4
LONGEST_QUEUE = 256
ETHERNET, RST = 14, 0x04


class Settings:
    """FOLDER/wire, looked at every 20 ms."""

    def __init__(self, path):
        self.path = path
        self.looked = 0.0
        self.words = {}

    def look(self, now):
        if now - self.looked < 0.02:
            return
        self.looked = now
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            text = ""
        self.words = {k: float(v) for k, v in (w.split("=") for w in text.split())}

    def __getattr__(self, name):
        return self.words.get(name, 0.0)


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset_frame(macs, addresses, ports, sequence):
    head = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, 6, 0) + addresses
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    end = ports + sequence + b"\0\0\0\0" + bytes([5 << 4, RST]) + b"\0\0" + b"\0\0" + b"\0\0"
    pseudo = addresses + struct.pack("!BBH", 0, 6, 20)
    end = end[:16] + struct.pack("!H", checksum(pseudo + end)) + end[18:]
    return macs + b"\x08\x00" + head + end


def as_resets(frame):
    """Of TCP data, the end of the connection for its receiver and for its sender; else None."""
    ip = frame[ETHERNET:]
    if frame[12:14] != b"\x08\x00" or len(ip) < 40 or ip[0] != 0x45 or ip[9] != 6:
        return None
    tcp = ip[20:]
    if int.from_bytes(ip[2:4], "big") <= 20 + 4 * (tcp[12] >> 4):  # without data
        return None
    there = reset_frame(frame[:12], ip[12:20], tcp[:4], tcp[4:8])
    macs, addresses = frame[6:12] + frame[:6], ip[16:20] + ip[12:16]
    return there, reset_frame(macs, addresses, tcp[2:4] + tcp[:2], tcp[8:12])


class Way:
    """One direction: frames of `source` on their way into `sink`."""

    def __init__(self, source, sink):
        self.source = source
        self.sink = sink
        self.free = 0.0  # when the last frame has left
        self.waiting = collections.deque()  # when each of them leaves


class Wire:
    def __init__(self, settings, ends):
        self.settings = settings
        self.ways = {ends[0].fileno(): Way(*ends), ends[1].fileno(): Way(ends[1], ends[0])}
        self.due = []
        self.frames = 0
        self.random = random.Random(1)

    def take(self, way, now):
        try:
            frame, address = way.source.recvfrom(65536)
        except OSError:  # the cable has been cut: said once, then it is silent
            return
        if address[2] == PACKET_OUTGOING:
            return
        words = self.settings
        self.frames += 1
        if words.stall or (words.frames and self.frames > words.frames):
            return
        if self.random.random() * 100 < words.loss:
            return
        resets = as_resets(frame) if words.reset else None
        if resets:
            frame = resets[0]
            self.send(way.source, resets[1])
        while way.waiting and way.waiting[0] <= now:
            way.waiting.popleft()
        if len(way.waiting) >= LONGEST_QUEUE:
            return
        seconds = len(frame) * 8 / (words.mbit * 1e6) if words.mbit else 0.0
        way.free = max(way.free, now) + seconds
        way.waiting.append(way.free)
        heapq.heappush(self.due, (way.free + words.delay_ms / 1000, self.frames, way.sink, frame))

    @staticmethod
    def send(sink, frame):
        with contextlib.suppress(OSError):  # the cable has been cut
            sink.send(frame)

    def run(self):
        poll = select.poll()
        for end in self.ways:
            poll.register(end, select.POLLIN)
        while True:
            now = time.monotonic()
            self.settings.look(now)
            while self.due and self.due[0][0] <= now:
                _, _, sink, frame = heapq.heappop(self.due)
                self.send(sink, frame)
            wait = min(0.02, self.due[0][0] - now) if self.due else 0.02
            for end, _ in poll.poll(wait * 1000):
                self.take(self.ways[end], time.monotonic())


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    with open(folder / "middle", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            sys.exit("two_hosts_wire: cannot enter the namespace in the middle")
    ends = []
    for name in ("mid_east", "mid_west"):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        end.bind((name, 0))
        ends.append(end)
    (folder / "wire_up").touch()
    Wire(Settings(folder / "wire"), ends).run()


if __name__ == "__main__":
    main()
