/** Conversion to and from protobuf durations, and deadlines. */

import { create } from "@bufbuild/protobuf";
import { type Duration, DurationSchema } from "@bufbuild/protobuf/wkt";

/** A protobuf duration of `ms` milliseconds, or undefined for undefined. Throws TypeError for what is no finite number. */
export function durationOf(ms: number | undefined): Duration | undefined {
  if (ms === undefined) return undefined;
  if (!Number.isFinite(ms)) throw new TypeError(`a time is a number of milliseconds, not ${ms}`);
  const seconds = Math.floor(ms / 1000);
  return create(DurationSchema, { seconds: BigInt(seconds), nanos: Math.floor((ms - seconds * 1000) * 1e6) });
}

// A year. grpc-js ends the process for a deadline that it cannot send.
const LONGEST_TIMEOUT_MS = 365 * 86_400_000;

/**
 * When a time from now on ends, in milliseconds since the epoch. Undefined: never, as for more than a year. Throws TypeError
 * for what is no number: as a text it would be joined to the present time.
 */
export function deadlineOf(timeoutMs: number | undefined): number | undefined {
  if (timeoutMs !== undefined && (typeof timeoutMs !== "number" || Number.isNaN(timeoutMs))) {
    throw new TypeError(`timeoutMs is a number of milliseconds, not ${String(timeoutMs)}`);
  }
  return timeoutMs !== undefined && timeoutMs <= LONGEST_TIMEOUT_MS ? Date.now() + timeoutMs : undefined;
}

/** The milliseconds of a protobuf duration, or undefined for undefined. */
export function msOf(duration: Duration | undefined): number | undefined {
  return duration && Number(duration.seconds) * 1e3 + duration.nanos / 1e6;
}
