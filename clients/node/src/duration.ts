/** Conversion to protobuf durations. */

import type { Duration } from "./gen/google/protobuf/duration.js";

/** A protobuf duration of `ms` milliseconds, or undefined for undefined. */
export function durationOf(ms: number | undefined): Duration | undefined {
  if (ms === undefined) return undefined;
  const seconds = Math.floor(ms / 1000);
  return { seconds: BigInt(seconds), nanos: Math.floor((ms - seconds * 1000) * 1e6) };
}
