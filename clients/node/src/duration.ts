/** Conversion to and from protobuf durations. */

import { create } from "@bufbuild/protobuf";
import { type Duration, DurationSchema } from "@bufbuild/protobuf/wkt";

/** A protobuf duration of `ms` milliseconds, or undefined for undefined. */
export function durationOf(ms: number | undefined): Duration | undefined {
  if (ms === undefined) return undefined;
  const seconds = Math.floor(ms / 1000);
  return create(DurationSchema, { seconds: BigInt(seconds), nanos: Math.floor((ms - seconds * 1000) * 1e6) });
}

/** The milliseconds of a protobuf duration, or undefined for undefined. */
export function msOf(duration: Duration | undefined): number | undefined {
  return duration && Number(duration.seconds) * 1e3 + duration.nanos / 1e6;
}
