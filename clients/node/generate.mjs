// Generates src/gen from the protos of the repository.
//
//     node generate.mjs           writes src/gen
//     node generate.mjs --check   fails if that differs from what would be written; writes nothing
//
// protoc is the one of the repository's Python environment (`make setup`), or the command in $PROTOC.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, mkdirSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const PROTOS = join(HERE, "..", "..", "protos");
const GENERATED = join(HERE, "src", "gen");
const PYTHON = join(HERE, "..", "..", ".venv", "bin", "python");
// What callers use: worker.proto is internal. settings.proto declares options that types.proto uses. The errors' details are in
// no file that these import.
const SOURCES = ["admin", "executor", "runner", "settings", "types"].map((name) => `quire/v1/${name}.proto`);
const DETAILS = ["error_details", "status"].map((name) => `google/rpc/${name}.proto`);
const OPTIONS = ["target=ts", "import_extension=js"];

function generate(directory) {
  mkdirSync(directory, { recursive: true });
  const [command, ...first] = process.env.PROTOC
    ? process.env.PROTOC.split(" ")
    : existsSync(PYTHON)
      ? [PYTHON, "-m", "grpc_tools.protoc"]
      : ["protoc"];
  const done = spawnSync(
    command,
    [
      ...first,
      `-I${PROTOS}`,
      `--plugin=protoc-gen-es=${join(HERE, "node_modules", ".bin", "protoc-gen-es")}`,
      `--es_out=${directory}`,
      `--es_opt=${OPTIONS.join(",")}`,
      ...SOURCES,
      ...DETAILS,
    ],
    { stdio: "inherit" },
  );
  if (done.error) throw done.error;
  if (done.status !== 0) process.exit(done.status ?? 1);
}

/** The files of a directory, by their paths in it. */
function contents(directory) {
  if (!existsSync(directory)) return new Map();
  const files = readdirSync(directory, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
  return new Map(
    files.map((entry) => {
      const path = join(entry.parentPath, entry.name);
      return [relative(directory, path), readFileSync(path, "utf8")];
    }),
  );
}

if (process.argv.includes("--check")) {
  const scratch = mkdtempSync(join(tmpdir(), "quire-node-"));
  try {
    generate(scratch);
    const [fresh, committed] = [contents(scratch), contents(GENERATED)];
    const stale = [...new Set([...fresh.keys(), ...committed.keys()])].filter(
      (name) => fresh.get(name) !== committed.get(name),
    );
    for (const name of stale) console.error(`src/gen/${name} does not match the protos: run \`npm run generate\``);
    process.exitCode = stale.length ? 1 : 0;
  } finally {
    rmSync(scratch, { recursive: true });
  }
} else {
  rmSync(GENERATED, { recursive: true, force: true });
  generate(GENERATED);
}
