// What Metal reserves and no kernel here uses: as an identifier it is refused, by both compilers.
//
// Apple's compiler takes these for keywords, or its library for macros and types (Metal Shading
// Language Specification: function and address-space qualifiers, textures, ray tracing, and the
// C++ that Metal leaves out).
#pragma GCC poison vertex fragment kernel
#pragma GCC poison threadgroup_imageblock ray_data object_data coherent imageblock
#pragma GCC poison patch_control_point interpolant
#pragma GCC poison sampler texture texture1d texture1d_array texture2d texture2d_array
#pragma GCC poison texture2d_ms texture2d_ms_array texture3d texturecube texturecube_array
#pragma GCC poison texture_buffer depth2d depth2d_array depth2d_ms depth2d_ms_array
#pragma GCC poison depthcube depthcube_array
#pragma GCC poison command_buffer render_command compute_command render_pipeline_state
#pragma GCC poison compute_pipeline_state depth_stencil_state mesh_grid_properties
#pragma GCC poison acceleration_structure instance_acceleration_structure
#pragma GCC poison primitive_acceleration_structure intersector intersection_query
#pragma GCC poison intersection_result intersection_params raytracing
#pragma GCC poison visible_function_table intersection_function_table
#pragma GCC poison r8unorm r8snorm r16unorm r16snorm rg8unorm rg8snorm rg16unorm rg16snorm
#pragma GCC poison rgba8unorm srgba8unorm rgba8snorm rgba16unorm rgba16snorm
#pragma GCC poison rgb10a2 rg11b10f rgb9e5
#pragma GCC poison packed_float2 packed_float3 packed_float4 packed_half2 packed_half3 packed_half4
#pragma GCC poison double wchar_t thread_local register virtual dynamic_cast typeid
#pragma GCC poison try catch throw goto new delete asm
