/** Conversion to and from protobuf durations, deadlines and timers. */

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
// Node's timers do not support longer delays.
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Throws TypeError for what is no number: as a text it would be joined to the present time. */
function checkNumber(name: string, ms: unknown): void {
  if (typeof ms !== "number" || Number.isNaN(ms)) throw new TypeError(`${name} is a number of milliseconds, not ${String(ms)}`);
}

/** Checks a setting that is a time. Throws TypeError for what is no number, and RangeError for a negative one. */
export function checkTime(name: string, ms: number | undefined): void {
  if (ms === undefined) return;
  checkNumber(name, ms);
  if (ms < 0) throw new RangeError(`${name} must be at least 0, not ${ms}`);
}

/** When a time from now on ends, in milliseconds since the epoch. Undefined: never, as for more than a year. Throws TypeError. */
export function deadlineOf(timeoutMs: number | undefined): number | undefined {
  if (timeoutMs === undefined) return undefined;
  checkNumber("timeoutMs", timeoutMs);
  return timeoutMs <= LONGEST_TIMEOUT_MS ? Date.now() + timeoutMs : undefined;
}

/** Calls `run` after a time. Undefined: never, as for more than a timer supports. */
export function timerOf(ms: number | undefined, run: () => void): NodeJS.Timeout | undefined {
  return ms === undefined || ms > LONGEST_TIMER_MS ? undefined : setTimeout(run, Math.max(ms, 1));
}

/** The milliseconds of a protobuf duration, or undefined for undefined. */
export function msOf(duration: Duration | undefined): number | undefined {
  return duration && Number(duration.seconds) * 1e3 + duration.nanos / 1e6;
}
