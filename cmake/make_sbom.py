"""Writes the bill of materials of a wheel (CycloneDX 1.6): what is compiled into it, and with what.

`make_sbom.py FILE VERSION [NAME=VERSION...] [tool:NAME=VERSION...]`; parts without a version are
left out. The same arguments and SOURCE_DATE_EPOCH give the same bytes.
"""

import json
import os
import sys
import time
import uuid

#: Licence, and package URL of each part that a build may name.
PARTS = {
    "nanobind": ("BSD-3-Clause", "pkg:pypi/nanobind@{}"),
    "robin-map": ("MIT", "pkg:github/Tessil/robin-map@{}"),
    "nlohmann_json": ("MIT", "pkg:github/nlohmann/json@v{}"),
    "CLI11": ("BSD-3-Clause", "pkg:github/CLIUtils/CLI11@v{}"),
    "CUDA runtime": ("LicenseRef-NVIDIA-CUDA-EULA", "pkg:generic/nvidia/cuda-cudart@{}"),
}


def component(name, version):
    license_id, url = PARTS[name]
    key = "name" if license_id.startswith("LicenseRef") else "id"
    part = {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "licenses": [{"license": {key: license_id}}],
        "purl": url.format(version),
    }
    if name == "robin-map":  # its files come with nanobind
        part["version"], part["purl"] = f"in nanobind {version}", "pkg:github/Tessil/robin-map"
    return part


def bill(release, arguments):
    given = [text.partition("=")[::2] for text in arguments]
    given = [(name, version) for name, version in given if version]
    parts = [component(name, text) for name, text in given if not name.startswith("tool:")]
    tools = [(name[5:], text) for name, text in given if name.startswith("tool:")]
    metadata = {
        "component": {
            "type": "library",
            "bom-ref": "waybill",
            "name": "waybill",
            "version": release,
            "licenses": [{"license": {"id": "Apache-2.0"}}],
            "purl": f"pkg:pypi/waybill@{release}",
        },
        "tools": {
            "components": [{"type": "application", "name": n, "version": v} for n, v in tools]
        },
    }
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        metadata["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(epoch)))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([metadata, parts]))}",
        "version": 1,
        "metadata": metadata,
        "components": parts,
        "dependencies": [{"ref": "waybill", "dependsOn": [part["bom-ref"] for part in parts]}],
    }


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(bill(sys.argv[2], sys.argv[3:]), file, indent=1)
        file.write("\n")
